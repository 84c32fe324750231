import re
from pathlib import Path

import pytest

from benchmarks.cases import choose
from benchmarks.goals import GOALS, Mark, goal, marks
from benchmarks.peers import Peer, Setting


README = (Path(__file__).parents[2] / "benchmarks/README.md").read_text(encoding="utf-8")


def documented(threads: int | None) -> set[tuple[str, int, int, float]]:
    """Case, sequences, tokens and largest ratio of the goals in the README's table."""
    goals = set()
    for case, cpu, gpu in re.findall(r"^\| `(model/\w+)` \| (.*) \| (.*) \|$", README, re.MULTILINE):
        ratio, where = re.fullmatch(r"(.+) \((.+) tokens\)", gpu if threads is None else cpu).groups()
        number, _, share = ratio.partition(" / ")
        for tokens in where.replace(",", "").split(" and "):
            batch, _, length = tokens.rpartition(" × ")
            goals.add((case, int(batch or 1), int(length), float(number) / float(share or 1)))
    return goals


@pytest.mark.parametrize("threads", [2, None])
def test_the_readme_has_the_goals(threads: int | None) -> None:
    goals = [one for one in GOALS if one.threads == threads]
    assert {(one.case, one.setting.batch, one.setting.length, one.at_most) for one in goals} == documented(threads)
    assert len(goals) == len(documented(threads)) >= 3


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
