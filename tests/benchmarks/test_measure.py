import time

import pytest
import torch

from benchmarks.measure import in_turn, peak_memory, seconds, spread


MB = 1_000_000


def test_every_round_has_every_name_and_begins_with_another_one() -> None:
    turns = [*in_turn("abc", 4)]
    assert "".join(name for _, name in turns) == "abc" + "bca" + "cab" + "abc"
    assert [number for number, _ in turns] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_spread_is_median_least_and_most() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0]) == {"median": 3.0, "least": 1.0, "most": 5.0}


def test_time_is_what_a_call_takes() -> None:
    assert 0.05 <= seconds(lambda: time.sleep(0.05), "cpu") < 5


@pytest.mark.parametrize("megabytes", [20, 80])
def test_peak_memory_is_that_of_a_step_though_it_is_given_back(megabytes: int) -> None:
    kept = torch.ones(30 * MB // 4)
    if peak_memory(lambda: None, "cpu") is None:
        pytest.skip("this system does not count a process's memory")
    assert peak_memory(lambda: kept.add_(1), "cpu") == pytest.approx(0, abs=2 * MB)
    for _ in range(2):  # memory that the first call freed must not hide the second
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
