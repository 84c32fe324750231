"""The probe of throughput: order of the timed steps, and rates of known times."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffllama import DiffLlamaConfig
from diffllama.configuration import preset
from diffllama.evaluation.probes import model_pair, throughput
from diffllama.evaluation.probes.throughput import PASSES, WARM_UP, Throughput, check, step
from diffllama.evaluation.runs import Report
from support.probe_runs import run_probe
from support.tiny_models import VARIANTS, tiny_model, tokens


def measured(output: Path, **settings: Any) -> Report:
    return run_probe(
        Throughput(**({"length": [8, 16], "rounds": 3, "batch": 2, "device": "cpu"} | settings)), output=output
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_per_second_of_models_that_take_turns(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, timed = [], []

    def stepping(model: Any, ids: torch.Tensor, name: str) -> None:
        stepped.append((model.config.model_type, ids.shape, name))
        step(model, ids, name)

    def seconds(self: Throughput, do: Callable[[], object]) -> float:  # known times that differ by round
        do()
        timed.append(stepped[-1])
        kind, (_, length), name = stepped[-1]
        number = (len(timed) - 1) // 8
        return length * (2 if kind == "diff_llama" else 1) * (3 if "backward" in name else 1) * 2**number

    monkeypatch.setattr(throughput, "step", stepping)
    monkeypatch.setattr(Throughput, "seconds", seconds)
    dtype = {"v1": "float32", "v2": "bfloat16"}[variant]
    report = measured(tmp_path, variant=variant, rounds=6, dtype=dtype)
    turns = 3 * [["llama", "diff_llama"], ["diff_llama", "llama"]]
    assert timed == [
        (kind, (2, length), name) for turn in turns for length in (8, 16) for name in PASSES for kind in turn
    ]
    assert len(stepped) == len(timed) + 8 * WARM_UP
    for length in (8, 16):
        for name, slower in zip(PASSES, (1, 3), strict=True):
            (row,) = report.select(**{"pass": name, "length": length})
            numbers = row["models"][0]
            mean = sum(2 / 2**number for number in range(6)) / 6 / slower  # 2 sequences in 1, 2, 4, … times the length
            assert numbers["transformer_tokens_per_second"]["mean"] == pytest.approx(mean)
            assert numbers["diff_tokens_per_second"]["mean"] == pytest.approx(mean / 2)
            assert numbers["diff_tokens_per_second"]["low"] < numbers["diff_tokens_per_second"]["high"]
            assert numbers["ratio"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
            assert row["samples"] == 6
    (facts,) = report.record["models"]
    assert facts["parameters"]["diff"] > facts["parameters"]["transformer"] > 10_000
    assert (facts["dtype"], facts["threads"]) == (dtype, torch.get_num_threads())
    assert facts["machine"]


@pytest.mark.parametrize("size", [None, "3b", "13.1b"])
def test_both_variants_are_timed_beside_the_same_transformer(size: str | None) -> None:
    v1, v2 = (Throughput(size=size, variant=variant).configs() for variant in VARIANTS)
    assert v1["transformer"].to_dict() == v2["transformer"].to_dict()
    assert v1["diff"].to_dict() == (preset(size) if size else DiffLlamaConfig(**model_pair.SMALL)).to_dict()
    llama, ours = v2["transformer"], v2["diff"]
    expected = ("v2", 2 * llama.num_attention_heads, llama.head_dim)
    assert (ours.diff_variant, ours.num_attention_heads, ours.head_dim) == expected


@pytest.mark.parametrize(("size", "variant"), [("3b-v1-4to1", "v2"), ("3b-v2-4to1", "v1")])
def test_size_with_groups_keeps_them_in_v2(size: str, variant: str) -> None:
    probe = Throughput(size=size, variant=variant)
    ours = probe.configs()["diff"]
    assert (ours.diff_variant, ours.signals_per_noise, ours.head_dim) == ("v2", 4, 128)
    assert probe.labels["diff"] == "DIFF V2"


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_pass_has_no_gradients_and_backward_pass_has(variant: str) -> None:
    model, ids, reached, losses = tiny_model(variant), tokens(1, 8), [], []
    model.model.embed_tokens.weight.register_hook(reached.append)
    model.register_forward_hook(lambda model, inputs, output: losses.append(output.loss.requires_grad))
    step(model, ids, "forward")
    assert (losses, reached) == ([False], [])
    step(model, ids, "forward + backward")
    assert (losses[1:], len(reached)) == ([True], 1)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("fault", ["loss", "gradient", "frozen"])
def test_model_without_finite_loss_and_gradients_is_not_timed(fault: str) -> None:
    model = tiny_model("v2")
    check("diff", model, tokens(1, 8))
    weight = model.model.layers[1].self_attn.lambda_proj.weight
    if fault == "loss":
        weight.data.fill_(torch.nan)
    elif fault == "gradient":
        weight.register_hook(lambda grad: grad * torch.inf)
    else:
        weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"diff's loss or gradients are not finite in torch\.float32\."):
        check("diff", model, tokens(1, 8))


def test_time_is_what_a_step_takes() -> None:
    assert 0.05 <= Throughput(device="cpu").seconds(lambda: time.sleep(0.05)) < 5


@pytest.mark.gpu
def test_time_on_a_gpu_is_until_it_has_done_its_work() -> None:
    square = torch.rand(8192, 8192, device="cuda")
    probe = Throughput()
    work = probe.seconds(lambda: [square @ square for _ in range(50)])
    start = time.perf_counter()
    _ = [square @ square for _ in range(50)]
    elapsed = time.perf_counter() - start
    assert work > 2 * elapsed


def test_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No preset '4b'\. Known: 3b, .*13\.1b"):
        measured(tmp_path, size="4b")
