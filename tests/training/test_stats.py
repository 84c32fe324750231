"""The difference of the two maps is measured correctly, and the measurement changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils

from diffllama import DiffLlamaForCausalLM
from diffllama.training import DifferentialStatsCallback, differential_stats
from support.reference import attention, under
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tokens


def expected_stats(model: DiffLlamaForCausalLM, row: torch.Tensor) -> dict[str, list[float]]:
    """Compute the reference for one sequence, layer by layer in float64 from each layer's input."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(kwargs["hidden_states"][0].double()), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(row[None])
    for hook in hooks:
        hook.remove()
    config, n = model.config, len(row)
    stats: dict[str, list[float]] = {"cosine": [], "lambda": [], "map_overlap": []}
    for i, x in enumerate(inputs):
        weights = {name: w.double() for name, w in under(model.state_dict(), f"model.layers.{i}.self_attn.").items()}
        _, differences, softmaxes = attention(
            x, weights, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril(),
            variant=config.diff_variant, layer=i, heads=config.num_signal_heads, noise_heads=config.num_noise_heads,
            key_value_heads=config.num_key_value_heads,
            lambda_start=config.lambda_init[i] if isinstance(config.lambda_init, list) else None,
        )  # fmt: skip
        r = config.signals_per_noise
        signals = [at for at in range(config.num_attention_heads) if at % (r + 1) < r]
        noises = [at // (r + 1) * (r + 1) + r for at in signals]
        first = torch.stack([softmaxes[at] for at in signals])
        subtracted = first - torch.stack(differences)  # λ·A2, whose rows sum to λ
        queries = (x @ weights["q_proj.weight"].T).reshape(n, config.num_attention_heads, -1)
        stats["cosine"].append(torch.cosine_similarity(queries[:, signals], queries[:, noises], dim=-1).mean().item())
        stats["lambda"].append(subtracted.sum(-1).mean().item())
        stats["map_overlap"].append(torch.minimum(first, subtracted).clamp(min=0).sum(-1).mean().item())
    return stats


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float32, {"num_attention_heads": 6, "num_noise_heads": 2, "lambda_init": [-0.2, 0.5]}),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_are_those_of_the_papers_formulas(variant: str, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    model, row = tiny_model(variant, dtype, "sdpa", **fields), tokens(11)
    stats, expected = differential_stats(model, row[None]), expected_stats(model, row)
    assert list(stats) == list(expected)
    for name, layers in expected.items():
        assert len(layers) == 2
        assert stats[name] == pytest.approx(layers, abs=1e-5 if dtype == torch.float32 else 5e-3)


def test_statistics_are_the_mean_of_all_rows() -> None:
    model, rows = tiny_model("v2"), tokens(3, 11)
    together, alone = differential_stats(model, rows), [differential_stats(model, row[None]) for row in rows]
    for name, layers in together.items():
        for i, value in enumerate(layers):
            assert value == pytest.approx(sum(stats[name][i] for stats in alone) / 3, abs=1e-6)


def test_equal_maps_cancel_by_lambda() -> None:
    model = tiny_model("v2")
    for layer in model.model.layers:  # as after a conversion
        queries = layer.self_attn.q_proj.weight.data.unflatten(0, (-1, 2, 16))
        queries[:, 1] = queries[:, 0]
        layer.self_attn.lambda_proj.weight.data.zero_()
    stats = differential_stats(model, tokens(2, 9))
    assert stats["cosine"] == pytest.approx([1, 1], abs=1e-6)
    assert stats["lambda"] == [0.5, 0.5]
    assert stats["map_overlap"] == pytest.approx([0.5, 0.5], abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_measuring_leaves_the_model_as_it_was(variant: str) -> None:
    model = tiny_model(variant, attn_implementation="sdpa", attention_dropout=0.5, **EVERY_FEATURE).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    assert differential_stats(model, tokens(1, 9)) == differential_stats(model, tokens(1, 9))
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_failed_measuring_leaves_the_model_as_it_was() -> None:
    model = tiny_model(attn_implementation="sdpa").train()
    with pytest.raises(IndexError):
        differential_stats(model, torch.full((1, 3), 97))
    assert model.training
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapter_is_measured_with_its_model(variant: str) -> None:
    row = tokens(1, 9)
    before = differential_stats(tiny_model(variant), row)
    adapted = get_peft_model(tiny_model(variant), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    after, merged = differential_stats(adapted, row), differential_stats(adapted.merge_and_unload(), row)
    assert after["cosine"] != pytest.approx(before["cosine"], abs=1e-3)
    assert after["cosine"] == pytest.approx(merged["cosine"], abs=1e-5)


def test_statistics_of_another_model_are_refused() -> None:
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match=r"must be a differential Llama .*got `llama`"):
        differential_stats(llama, tokens(1, 3))
    with pytest.raises(ValueError, match="got `Linear`"):
        differential_stats(torch.nn.Linear(2, 2), tokens(1, 3))


class Recorder(TrainerCallback):
    """A logger integration of transformers."""

    seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append({"step": state.global_step, **logs})


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logger_gets_the_statistics_and_training_is_not_disturbed(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "recorder", Recorder)
    monkeypatch.setattr(Recorder, "seen", [])
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]
    trained = []
    for measured in (False, True):
        model = tiny_model(variant, attn_implementation="sdpa", attention_dropout=0.1)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=4, logging_steps=2, learning_rate=1e-2, per_device_train_batch_size=2,
            report_to=["recorder"] if measured else [], use_cpu=True, save_strategy="no", seed=1,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        if measured:
            trainer.add_callback(DifferentialStatsCallback(trainer, tokens(1, 9)))
            start = differential_stats(model, tokens(1, 9))
        trainer.train()
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    end = differential_stats(trainer.model, tokens(1, 9))
    logged = [entry for entry in Recorder.seen if "diff_cosine" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    assert [entry["step"] for entry in Recorder.seen if "loss" in entry] == [2, 4]
    for entry, stats in ((logged[0], start), (logged[-1], end)):
        for name, layers in stats.items():
            assert entry[f"diff_{name}"] == pytest.approx(sum(layers) / 2)
    assert logged[0]["diff_cosine"] != logged[-1]["diff_cosine"]
    history = [entry for entry in trainer.state.log_history if "diff_cosine" in entry]
    assert [entry["diff_lambda"] for entry in history] == [entry["diff_lambda"] for entry in logged]
