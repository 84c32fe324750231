import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import training_step
from benchmarks.compared import NAMES, build


def test_the_benchmark_measures_every_model_in_every_case_and_prints_ratios_of_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options = ["--width", "128", "--layers", "1", "--tokens", "33", "--rounds", "3", "--json", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", ["training_step", *map(str, options)])
    timed = []

    def milliseconds(step: Callable[[], object]) -> float:  # a time that is known: the first model's is least
        step()
        timed.append(2.0 + len(timed) % len(NAMES) + len(timed) // len(NAMES) % 3)
        return timed[-1]

    monkeypatch.setattr(training_step, "milliseconds", milliseconds)
    training_step.main()
    report, printed = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert (report["machine"]["tokens"], report["machine"]["width"]) == (33, 128)
    assert list(report["results"]) == list(training_step.CASES)
    assert {"float32", "float32, checkpointing"} <= set(report["results"])
    assert len(timed) == 3 * len(NAMES) * len(training_step.CASES)
    for name, sizes in report["models"].items():
        model = build(name, 128, 1)
        nbytes, tensors = 4 * model.num_parameters(), len(list(model.parameters()))
        assert sizes["weights_mb"] == nbytes / 1e6
        assert sizes["optimizer_mb"] == pytest.approx((2 * nbytes + 4 * tensors) / 1e6)  # two moments, and a counter
        assert f"{sizes['weights_mb']:.1f}" in printed
    for case in report["results"].values():
        assert list(case) == list(NAMES)
        for i, (name, row) in enumerate(case.items()):
            assert (row["milliseconds"], row["spread"]) == (3.0 + i, 2.0)
            assert row["step_mb"] >= 0
            assert row["peak_mb"] == pytest.approx(sum(report["models"][name].values()) + row["step_mb"])
            for key in ("milliseconds", "peak_mb"):
                ratio = row[key] / case["llama"][key]
                assert row[f"{key}_ratio"] == ratio
                assert f"{row[key]:.1f}{' (2.0)' * (key == 'milliseconds')}  {ratio:.2f}x" in printed


def refused(model: torch.nn.Module, match: str, optimized: slice = slice(None)) -> None:
    model.zero_grad()
    with pytest.raises(AssertionError, match=match):
        training_step.check(model, AdamW([*model.parameters()][optimized], lr=1e-4))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_does_not_learn_is_refused(name: str) -> None:
    model = build(name, 128, 1).train()
    training_step.check(model, AdamW(model.parameters(), lr=1e-4))
    refused(model, r"A step does not change model\.embed_tokens\.weight", slice(1, None))
    model.lm_head.weight.requires_grad_(False)
    refused(model, r"float32: lm_head\.weight has no gradient")


@pytest.mark.parametrize("scale", [1.1, torch.nan])
@pytest.mark.parametrize("name", ["llama", "ours V1", "ours V2"])
def test_a_model_that_computes_something_else_is_refused(
    name: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, sdpa: Callable = ALL_ATTENTION_FUNCTIONS["sdpa"], **kwargs: Any) -> tuple[torch.Tensor, None]:
        return scale * sdpa(*args, **kwargs)[0], None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", wrong)
    refused(build(name, 128, 1).train(), "float32: .* differs from eager's by")


def test_memory_is_what_torch_has_allocated_at_a_time_though_it_is_given_back() -> None:
    kept, megabyte = torch.ones(1_000_000, device=training_step.DEVICE), pytest.approx(1, abs=0.01)
    assert training_step.step_mb(lambda: None) == 0
    assert training_step.step_mb(lambda: kept.add_(1)) / 4 < 0.01
    assert training_step.step_mb(lambda: [kept + 1 for _ in range(3)]) / 12 == megabyte
    assert training_step.step_mb(lambda: [(kept + 1).sum() for _ in range(3)]) / 4 == megabyte


def test_time_is_what_a_step_takes() -> None:
    assert 50 <= training_step.milliseconds(lambda: time.sleep(0.05)) < 5000
