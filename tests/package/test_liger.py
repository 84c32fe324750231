"""`TrainingArguments(use_liger_kernel=True)` replaces operations of the model by Liger's kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Trainer, TrainingArguments

from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tokens


rms_norm = pytest.importorskip("liger_kernel.ops.rms_norm")

from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply  # noqa: E402


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS: dict[str, dict[str, Any]] = {"plain": {}, "every feature": EVERY_FEATURE, "tied": {"tie_word_embeddings": True}}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter run Liger's kernels: it takes no numbers with a point and knows no CUDA functions."""
    if DEVICE == "cuda":
        return
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats_too(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert_floats_too)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))


def batch() -> dict[str, torch.Tensor]:
    """Return two sequences, whose first tokens have no labels."""
    ids = tokens(2, 9).to(DEVICE)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(9, device=DEVICE) < 3, -100)}


def loss_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    output = model.train()(**batch())
    names, parameters = zip(*model.named_parameters(), strict=True)
    return output.loss, dict(zip(names, torch.autograd.grad(output.loss, parameters), strict=True))


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_every_gradient_are_as_accurate_as_without(variant: str, fields: dict[str, Any]) -> None:
    truth, plain, liger = (
        tiny_model(variant, dtype, **fields).to(DEVICE) for dtype in (torch.float64, torch.float32, torch.float32)
    )
    apply(liger)
    losses, gradients = zip(*map(loss_and_gradients, (truth, plain, liger)), strict=True)
    torch.testing.assert_close(losses[2].double(), losses[0].double(), rtol=1e-6, atol=0)
    whole = torch.stack([gradient.norm() for gradient in gradients[0].values()]).norm()
    for name, expected in gradients[0].items():
        errors = [(of[name].double() - expected).norm() for of in gradients[1:]]
        assert errors[1] <= 2 * errors[0] + 1e-6 * whole, (name, errors)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_operations_are_replaced(fields: dict[str, Any]) -> None:
    model = tiny_model("v1", **fields)
    apply(model)
    names = [module._get_name() for module in model.modules()]
    per_layer = 5 if model.config.use_qk_norm else 3
    assert names.count("LigerRMSNorm") == per_layer * model.config.num_hidden_layers + 1
    gated = model.config.hidden_act == "silu"
    assert names.count("LigerSwiGLUMLP") == gated * model.config.num_hidden_layers
    assert model.train()(**batch()).logits is None
    assert model(**batch(), skip_logits=False).logits.shape == (2, 9, 97)
    assert len(model(**batch(), return_dict=False)) == 2  # loss, KV cache


def test_outputs_of_evaluation_are_those_without() -> None:
    plain, liger = tiny_model().to(DEVICE), tiny_model().to(DEVICE)
    apply(liger, rms_norm=False, swiglu=False)
    expected, found = plain(**batch()), liger(**batch())
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(liger.generate(tokens(1, 4), **settings), plain.generate(tokens(1, 4), **settings))


@pytest.mark.parametrize("name", ["rope", "cross_entropy"])
def test_kernels_that_there_are_not_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is not supported for this model, got True"):
        apply(tiny_model(), **{name: True})


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_trainer_applies_them_and_logs_the_losses_of_training_without(
    variant: str, adapted: bool, tmp_path: Path
) -> None:
    logs = []
    for use in (False, True):
        torch.manual_seed(0)
        model: Any = tiny_model(variant)
        if adapted:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", modules_to_save=["lm_head"]))
        rows = [{"input_ids": row, "labels": row} for row in tokens(4, 6)]
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
            eval_strategy="steps", eval_steps=2, prediction_loss_only=True, save_strategy="no", report_to=[],
            use_cpu=DEVICE == "cpu", use_liger_kernel=use, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        assert any(type(m).__name__ != m._get_name() == "LigerRMSNorm" for m in model.modules()) == use
        logs.append(
            [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
        )
    assert len(logs[0]) == 3
    assert logs[1] == pytest.approx(logs[0], rel=2e-3)
    assert logs[1][0] == pytest.approx(logs[0][0], rel=1e-6)
