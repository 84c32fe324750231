from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.cases import CASES
from benchmarks.implementations import Implementation, Setting, implementations
from benchmarks.measure import Spread
from benchmarks.results import entry, measure, shown


SETTING = Setting("tiny", 2, 33)
CASE = CASES["model/train"]


def milliseconds(*times: float) -> Callable[[Callable[[], Any]], float]:
    """A clock that says these, one after the other, and runs what it should time."""
    left = iter(times)

    def clock(run: Callable[[], Any]) -> float:
        run()
        return next(left) / 1e3

    return clock


def printed(made: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(made)
    return captured.get()


def test_every_implementation_is_timed_in_turn_and_ratios_are_of_what_is_printed(functions: dict[str, Any]) -> None:
    compared = implementations(SETTING)
    # rounds: llama, transformers, V1, V2; transformers, V1, V2, llama; V1, V2, llama, transformers
    clock = milliseconds(10, 15, 12, 11, 16, 12, 11, 10, 24, 26, 20, 30)
    result = measure(CASE, SETTING, compared, rounds=3, clock=clock)
    assert list(result.rows) == compared
    assert result.refused == {}
    rows = {str(implementation): row for implementation, row in result.rows.items()}
    v1 = rows["ours V1, sdpa"]
    assert v1.times == [0.012, 0.012, 0.024]
    assert v1.seconds == Spread(0.012, 0.012, 0.024)
    assert v1.ratio == Spread(pytest.approx(1.2), pytest.approx(1.2), pytest.approx(1.2))
    assert v1.tokens_per_second == pytest.approx(66 / 0.012)
    assert rows["ours V2, sdpa"].ratio.most == pytest.approx(1.3)
    assert [rows[name].goal_status is None for name in rows] == [True, True, False, False]
    text = printed(shown(result))
    for expected in ("12 (12 to 24)", "1.20 (1.20 to 1.20)", "1.10 (1.10 to 1.30)", "< 1.50: met", "5,500"):
        assert expected in text
    made = entry(result)
    assert (made["case"], made["shape"], made["batch"], made["length"]) == ("model/train", "tiny", 2, 33)
    row = made["implementations"]["ours V1, sdpa"]
    assert row["milliseconds"] == {"median": 12, "least": 12, "most": 24, "rounds": [12, 12, 24]}
    assert row["ratio"]["median"] == pytest.approx(1.2)
    assert row["goal"] == {"at_most": None, "below": pytest.approx(1.5), "met": True}
    assert row["weights_mb"] > 0
    assert row["optimizer_mb"] > row["weights_mb"]
    assert "goal" not in made["implementations"]["llama, sdpa"]


def test_an_implementation_with_wrong_outputs_is_refused_and_not_timed(functions: dict[str, Any]) -> None:
    sdpa = functions["sdpa"]
    functions["fused"] = lambda *args, **kwargs: (1.1 * sdpa(*args, **kwargs)[0], None)
    wrong = {Implementation("v1", "fused"), Implementation("v2", "fused")}
    result = measure(CASES["model/prefill"], SETTING, implementations(SETTING), 1, milliseconds(*range(1, 5)))
    assert set(result.refused) == wrong
    assert not wrong & set(result.rows)
    assert len(result.rows) == 4
    for text in (printed(shown(result)), entry(result)["refused"]["ours V1, fused"]):
        assert "output logits differs from plain PyTorch's by" in text


def test_an_implementation_that_cannot_compute_it_is_refused_with_its_message(functions: dict[str, Any]) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("heads of 32\nare too small")

    functions["fused"] = broken
    result = measure(CASES["attention/decode"], SETTING, implementations(SETTING), 1, milliseconds(1, 2, 3))
    assert result.refused[Implementation("v1", "fused")] == "NotImplementedError: heads of 32 are too small"
    assert list(result.rows) == [Implementation("llama"), Implementation("v1"), Implementation("v2")]


def test_without_the_llama_nothing_is_timed(functions: dict[str, Any]) -> None:
    functions["sdpa"] = lambda *args, **kwargs: (torch.zeros(1), None)
    result = measure(CASES["attention/prefill"], SETTING, implementations(SETTING), 1, milliseconds())
    assert result.rows == {}
    assert Implementation("llama") in result.refused


def test_attention_alone_has_its_cost_by_arithmetic_beside_it(functions: dict[str, Any]) -> None:
    result = measure(CASES["attention/train"], SETTING, implementations(SETTING), 1, milliseconds(1, 2, 3))
    assert "v1 fused 1.14" in printed(shown(result))
    assert entry(result)["by_arithmetic"]["v1 fused"] == pytest.approx(16 / 14)
