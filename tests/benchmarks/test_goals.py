import pytest

from benchmarks.cases import choose
from benchmarks.goals import GOALS, Mark, goal, marks
from benchmarks.peers import Peer, Setting


def test_goals_are_those_that_were_set() -> None:
    small = {(one.case, one.setting.batch, one.setting.length): one.at_most for one in GOALS if one.threads == 2}
    assert small == {
        ("model/decode", 1, 2048): 1.10,
        ("model/decode", 1, 8192): 1.10,
        ("model/prefill", 1, 2048): 1.15,
        ("model/train", 2, 512): 1.10,
    }
    papers = {(one.case, one.setting.length): 1 / one.at_most for one in GOALS if one.threads is None}
    assert papers == {
        ("model/decode", 32768): 1.0,
        ("model/prefill", 4096): pytest.approx(0.95),
        ("model/train", 4096): pytest.approx(0.95),
    }


def test_what_runs_by_default_has_every_goals_setting() -> None:
    cases = {case.name: case for case in choose(["model"])}
    for one in GOALS:
        batch, lengths = getattr(cases[one.case], one.setting.device)
        assert batch == one.setting.batch
        assert one.setting.length in lengths


def test_a_goal_is_for_its_setting_and_threads_alone() -> None:
    setting = Setting("small", 1, 2048, new_tokens=5)
    assert goal("model/decode", setting, threads=2) == 1.10
    assert goal("model/decode", setting, threads=1) is None
    assert goal("model/decode", Setting("small", 1, 4096), threads=2) is None
    assert goal("model/decode", Setting("small", 1, 2048, "bfloat16"), threads=2) is None
    assert goal("model/decode", Setting("3b", 1, 32768, "bfloat16", "cuda"), threads=16) == 1.0


@pytest.mark.parametrize(
    ("mark", "met", "text"),
    [
        (Mark(1.10, 1.10, None), True, "≤ 1.10: met"),
        (Mark(1.11, 1.10, None), False, "≤ 1.10: MISSED"),
        (Mark(1.05, 1.10, 1.05), False, "≤ 1.10 and < 1.05: MISSED"),
        (Mark(1.05, 1.10, 1.06), True, "≤ 1.10 and < 1.06: met"),
        (Mark(1.50, None, 1.40), False, "< 1.40: MISSED"),
        (Mark(1.50, None, None), None, ""),
    ],
)
def test_a_mark_says_whether_all_is_met(mark: Mark, met: bool | None, text: str) -> None:
    assert (mark.met, str(mark)) == (met, text)


def test_every_row_of_ours_is_marked_and_no_other() -> None:
    ratios = {Peer("llama"): 1.0, Peer("transformers"): 1.3, Peer("v1"): 1.2, Peer("v2", "diff_fused"): 1.05}
    found = marks("model/decode", Setting("small", 1, 2048), 2, ratios)
    assert {peer: mark.met for peer, mark in found.items()} == {Peer("v1"): False, Peer("v2", "diff_fused"): True}
    assert all(mark.theirs == 1.3 for mark in found.values())
