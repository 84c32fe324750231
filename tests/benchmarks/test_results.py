from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.cases import CASES, Case
from benchmarks.cost import FLOPS
from benchmarks.implementations import Implementation, Setting, implementations
from benchmarks.measure import Step
from benchmarks.results import format_record, measure


SETTING = Setting("tiny", 2, 33)


def milliseconds(*times: float) -> Callable[[Callable[[], Any]], float]:
    """Return a clock that runs the timed function and returns these times, one after the other."""
    left = iter(times)

    def clock(run: Callable[[], Any]) -> float:
        run()
        return next(left) / 1e3

    return clock


def printed(case: Case, record: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(format_record(case, SETTING, record))
    return captured.get()


def test_every_implementation_is_timed_in_turn_and_ratios_are_of_what_is_printed(functions: dict[str, Any]) -> None:
    compared = implementations(SETTING)
    # order of the rounds: llama, transformers, V1, V2, llama 4:1, V2 4:1; then starting with transformers; then with V1
    clock = milliseconds(*(20, 30, 24, 26, 10, 12), *(16, 12, 11, 20, 22, 10), *(12, 11, 10, 11, 10, 15))
    record = measure(CASES["model/train"], SETTING, compared, rounds=3, clock=clock)
    assert (record["case"], record["shape"], record["batch"], record["length"]) == ("model/train", "tiny", 2, 33)
    assert record["refused"] == {}
    assert "by_arithmetic" not in record
    rows = record["implementations"]
    assert list(rows) == list(map(str, compared))
    v1 = rows["ours V1, sdpa"]
    assert v1["milliseconds"] == {"median": 12, "least": 12, "most": 24, "rounds": [24, 12, 12]}
    assert v1["ratio"] == pytest.approx({"median": 1.2, "least": 1.2, "most": 1.2})
    assert v1["tokens_per_second"] == pytest.approx(66 / 0.012)
    assert v1["goal"] == {"at_most": None, "below": pytest.approx(1.5), "met": True}
    assert v1["optimizer_mb"] > v1["weights_mb"] > 0
    assert rows["ours V2, sdpa"]["ratio"]["most"] == pytest.approx(1.3)
    assert ["goal" in row for row in rows.values()] == [False, False, True, True, False, True]
    grouped = rows["ours V2 4:1, sdpa"]  # compared with its own Llama, unlike transformers' model
    assert grouped["ratio"] == pytest.approx({"median": 1.1, "least": 1.1, "most": 1.2})
    assert grouped["goal"] == {"at_most": None, "below": None, "met": None}
    text = printed(CASES["model/train"], record)
    for expected in ("12 (12 to 24)", "1.20 (1.20 to 1.20)", "1.10 (1.10 to 1.30)", "< 1.50: met", "5,500"):
        assert expected in text


def test_every_call_that_is_timed_is_prepared() -> None:
    done: list[str] = []
    step = Step(lambda: done.append("run"), lambda: None, 1, before=lambda: done.append("prepared"))
    case = Case("model/none", "", lambda *_: None, lambda *_: step, (1, [1]), (1, [1]))
    measure(case, SETTING, [Implementation("llama")], 2, milliseconds(1, 1))
    assert done[-4:] == ["prepared", "run"] * 2


def test_implementation_with_wrong_outputs_is_refused_and_not_timed(functions: dict[str, Any]) -> None:
    sdpa = functions["sdpa"]
    functions["fused"] = lambda *args, **kwargs: (1.1 * sdpa(*args, **kwargs)[0], None)
    record = measure(CASES["model/prefill"], SETTING, implementations(SETTING), 1, milliseconds(*range(1, 7)))
    assert set(record["refused"]) == {"ours V1, fused", "ours V2, fused", "ours V2 4:1, fused"}
    assert len(record["implementations"].keys() - record["refused"].keys()) == 6
    for text in (printed(CASES["model/prefill"], record), record["refused"]["ours V1, fused"]):
        assert "output logits differs from plain PyTorch's by" in text


def test_implementation_that_cannot_compute_it_is_refused_with_its_message(functions: dict[str, Any]) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("heads of 32\nare too small")

    functions["fused"] = broken
    compared = implementations(SETTING, ["v1", "v2"])
    record = measure(CASES["attention/decode"], SETTING, compared, 1, milliseconds(1, 2, 3))
    assert record["refused"]["ours V1, fused"] == "NotImplementedError: heads of 32 are too small"
    assert set(record["refused"]) == {"ours V1, fused", "ours V2, fused"}
    assert list(record["implementations"]) == ["llama, sdpa", "ours V1, sdpa", "ours V2, sdpa"]


def test_without_the_llama_nothing_is_timed(functions: dict[str, Any]) -> None:
    functions["fused"], functions["sdpa"] = functions["sdpa"], lambda *args, **kwargs: (torch.zeros(1), None)
    record = measure(CASES["attention/prefill"], SETTING, implementations(SETTING), 1, milliseconds())
    assert record["implementations"] == {}
    assert "llama, sdpa" in record["refused"]


def test_attention_alone_has_its_cost_by_arithmetic_beside_it(functions: dict[str, Any]) -> None:
    record = measure(CASES["attention/train"], SETTING, implementations(SETTING), 1, milliseconds(*range(1, 6)))
    assert "v1 fused 1.14" in printed(CASES["attention/train"], record)
    assert record["by_arithmetic"]["v1 fused"] == pytest.approx(16 / 14)
    assert set(record["by_arithmetic"]) == set(FLOPS) - {"transformer"}
