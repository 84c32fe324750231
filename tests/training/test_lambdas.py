"""V1's λ vectors are trained beside an adapter, and saved with it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from diffllama.training import lambdas
from diffllama.training.lambdas import LAMBDAS, train_lambdas
from support.tiny_models import tiny_model, tokens


TASK = "CAUSAL_LM"
ROWS = [{"input_ids": row, "labels": row} for row in tokens(24, 9)]


def base(**fields: Any) -> torch.nn.Module:
    return tiny_model("v1", attn_implementation="sdpa", **fields)


def adapted(**fields: Any) -> PeftModel:
    """Return a model with a LoRA and trainable λ vectors; equal arguments give equal models."""
    model = base(**fields)
    torch.manual_seed(1)
    return train_lambdas(get_peft_model(model, LoraConfig(task_type=TASK)))


def trainer(folder: Path, **arguments: Any) -> Trainer:
    defaults = {
        "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-2, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "seed": 1,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **(defaults | arguments))
    return Trainer(adapted(), arguments, train_dataset=ROWS, eval_dataset=ROWS)


@pytest.fixture
def trained(tmp_path: Path) -> PeftModel:
    run = trainer(tmp_path / "run")
    run.train()
    return run.model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(2, 9)).logits


def vectors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if name.rpartition(".")[2] in LAMBDAS}


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_vectors_and_the_adapter_learn_and_nothing_else_moves(trained: PeftModel) -> None:
    before = dict(adapted().named_parameters())
    moved = {name for name, p in trained.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name or name in vectors(trained)}
    assert len(vectors(trained)) == 2 * len(LAMBDAS)


def test_gradients_of_the_lambdas_are_those_of_training_everything() -> None:
    model, whole = adapted(), base()
    for m in (model, whole):
        m.train()(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    for name, p in model.named_parameters():
        if name in vectors(model):
            expected = whole.get_parameter(name.removeprefix("base_model.model.")).grad
            assert expected.abs().max() > 0
            torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_saved_lambdas_load_onto_a_fresh_model(trained: PeftModel, tmp_path: Path, safe: bool) -> None:
    trained.save_pretrained(tmp_path / "saved", safe_serialization=safe)
    assert {file for file in files(tmp_path / "saved") if "model." in file} == {
        "adapter_model.safetensors" if safe else "adapter_model.bin"
    }
    assert torch.equal(logits(PeftModel.from_pretrained(base(), tmp_path / "saved")), logits(trained))


def test_transformers_loads_it_without_peft_being_asked(trained: PeftModel, tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    trained.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    trained.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="sdpa")
    assert torch.equal(logits(loaded), logits(trained))


def test_merged_model_has_the_trained_lambdas(trained: PeftModel, tmp_path: Path) -> None:
    expected, kept = logits(trained), vectors(trained)
    merged = trained.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=2e-5)
    merged.save_pretrained(tmp_path / "merged")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(saved[name.removeprefix("base_model.model.")], kept[name]) for name in kept)


def test_run_that_is_resumed_ends_bit_for_bit_where_the_whole_run_ends(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", max_steps=6, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = trainer(tmp_path / "resumed", max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    ended = dict(whole.model.named_parameters())
    assert all(torch.equal(p, ended[name]) for name, p in resumed.model.named_parameters())
    halfway = load_file(tmp_path / "whole" / "checkpoint-3" / "adapter_model.safetensors")
    assert not any(torch.equal(halfway[name], ended[name]) for name in vectors(whole.model))


def test_best_checkpoint_is_loaded_with_its_vectors(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, learning_rate=1.0,
        load_best_model_at_end=True, max_steps=2,
    )  # fmt: skip
    run.train()
    best = load_file(Path(run.state.best_model_checkpoint) / "adapter_model.safetensors")
    last = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert all(torch.equal(best[name], vector) for name, vector in vectors(run.model).items())
    assert not any(torch.equal(best[name], last[name]) for name in vectors(run.model))


def test_adapter_that_was_loaded_is_trained_and_saved_on(trained: PeftModel, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
    assert not any(p.requires_grad for name, p in again.named_parameters() if name in vectors(again))
    train_lambdas(train_lambdas(again))  # a second call changes nothing
    assert all(p.requires_grad for name, p in again.named_parameters() if name in vectors(again))
    again.save_pretrained(tmp_path / "again")
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_adapter_is_saved_with_the_lambdas(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(task_type=TASK))
    train_lambdas(model)
    model.save_pretrained(tmp_path / "ours")
    type(model).save_pretrained(model, tmp_path / "peft's")
    assert files(tmp_path / "ours").keys() == files(tmp_path / "peft's").keys()
    for file in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        ours, pefts = load_file(tmp_path / "ours" / file), load_file(tmp_path / "peft's" / file)
        assert ours.keys() - pefts.keys() == vectors(model).keys()
        assert all(torch.equal(ours[name], pefts[name]) for name in pefts)


def test_copied_model_saves_its_own_vectors(tmp_path: Path) -> None:
    model = adapted()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name in vectors(model):
            model.get_parameter(name).zero_()
    other.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], vector) for name, vector in vectors(other).items())


def test_prompt_learned_beside_the_lambdas_is_saved_with_them(tmp_path: Path) -> None:
    model = train_lambdas(get_peft_model(base(), PromptTuningConfig(task_type=TASK, num_virtual_tokens=4)))
    for vector in vectors(model):
        model.get_parameter(vector).data.add_(0.1)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(base(), tmp_path)), logits(model))


def test_disabled_adapter_leaves_the_lambdas_trained(trained: PeftModel) -> None:
    model = base()
    with torch.no_grad():
        for name, vector in vectors(trained).items():
            model.get_parameter(name.removeprefix("base_model.model.")).copy_(vector)
    with trained.disable_adapter():
        torch.testing.assert_close(logits(trained), logits(model), rtol=0, atol=1e-5)


def test_lambdas_in_half_precision_are_trained_and_saved_in_float32(tmp_path: Path) -> None:
    model = adapted(dtype=torch.bfloat16)
    with torch.no_grad():
        for name in vectors(model):
            model.get_parameter(name).add_(1e-5)  # smaller than bfloat16's rounding
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    model.save_pretrained(tmp_path)
    again = train_lambdas(PeftModel.from_pretrained(base(dtype=torch.bfloat16), tmp_path))
    # in float32: in bfloat16 a relative change of 1e-6 of λ moves a logit by one to seven rounding steps, by CPU
    exact = [logits(copy.deepcopy(one).float()) for one in (again, model)]
    torch.testing.assert_close(*exact, rtol=0, atol=1e-3)
    again = train_lambdas(get_peft_model(base(dtype=torch.bfloat16), LoraConfig(task_type=TASK)))
    again.load_adapter(tmp_path, "default")
    assert torch.equal(logits(again), logits(model))


def test_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    model.save_pretrained(tmp_path)
    before = files(tmp_path)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(lambdas, "save_file", full)
    with torch.no_grad():
        model.get_parameter(next(iter(vectors(model)))).add_(1)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path)
    assert files(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(before)  # and no temporary folder


def test_saving_again_keeps_the_card_that_someone_wrote(tmp_path: Path) -> None:
    model = adapted()
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text() + "\nTrained on my letters.\n"
    (tmp_path / "README.md").write_text(card)
    model.save_pretrained(tmp_path)
    assert "Trained on my letters." in (tmp_path / "README.md").read_text()


def test_v2_is_refused_with_how_its_projection_is_trained() -> None:
    with pytest.raises(ValueError, match=r"`diff_variant` 'v1', got 'v2'.*modules_to_save=\[\"lambda_proj\"\]"):
        train_lambdas(get_peft_model(tiny_model("v2"), LoraConfig(task_type=TASK)))


def test_model_without_an_adapter_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a PeftModel .*, got DifferentialLlamaForCausalLM"):
        train_lambdas(base())


def test_state_dict_without_lambdas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`state_dict` has no λ vectors"):
        adapted().save_pretrained(tmp_path, state_dict={"base_model.model.lm_head.weight": torch.zeros(97, 64)})
    assert not list(tmp_path.iterdir())
