import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.measure import Spread, Step, alternate, nothing, peak_memory, ratios, seconds


MB = 1_000_000


def test_every_round_times_every_step_and_begins_with_another_one() -> None:
    called, prepared = [], []

    def step(name: str) -> Step:
        return Step(lambda: called.append(name), nothing, before=lambda: prepared.append(name))

    def clock(run: Callable[[], object]) -> float:
        assert prepared[-1] not in called[-1:] or len(prepared) == len(called) + 1
        run()
        return float(len(called))

    times = alternate({name: step(name) for name in "abc"}, 4, clock)
    assert "".join(called) == "abc" + "bca" + "cab" + "abc"
    assert prepared == called
    assert times == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}


def test_ratios_are_of_times_in_the_same_round() -> None:
    times = {"llama": [1.0, 2.0, 10.0], "ours": [1.5, 2.0, 11.0]}  # the last round was slow for both
    assert ratios(times, "llama")["ours"] == Spread(median=1.1, least=1.0, most=1.5)
    assert ratios(times, "llama")["llama"] == Spread(1.0, 1.0, 1.0)


def test_spread_is_median_least_and_most() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0]) == Spread(median=3.0, least=1.0, most=5.0)


def test_time_is_what_a_call_takes() -> None:
    assert 0.05 <= seconds(lambda: time.sleep(0.05), "cpu") < 5


@pytest.mark.parametrize("megabytes", [20, 80])
def test_peak_memory_is_that_of_a_step_though_it_is_given_back(megabytes: int) -> None:
    kept = torch.ones(30 * MB // 4)
    if peak_memory(lambda: None, "cpu") is None:
        pytest.skip("this system does not count a process's memory")
    assert peak_memory(lambda: kept.add_(1), "cpu") == pytest.approx(0, abs=2 * MB)
    for _ in range(2):  # what the first one has freed does not hide the second
        peak = peak_memory(lambda: torch.ones(megabytes * MB // 4).sum(), "cpu")
        assert peak == pytest.approx(megabytes * MB, abs=2 * MB)


def test_peak_memory_is_none_where_it_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("benchmarks.measure.Path.write_text", missing)
    assert peak_memory(lambda: None, "cpu") is None


@pytest.mark.gpu
def test_peak_memory_of_a_gpu_is_what_torch_has_allocated() -> None:
    assert peak_memory(lambda: torch.ones(20 * MB // 4, device="cuda").sum(), "cuda") == pytest.approx(20 * MB, abs=MB)
