import re
from pathlib import Path

import pytest

from benchmarks.cases import choose
from benchmarks.goals import GOALS, GoalStatus, goal_statuses, largest_ratio
from benchmarks.implementations import Implementation, Setting


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
    goals = [goal for goal in GOALS if goal.threads == threads]
    assert {(goal.case, goal.setting.batch, goal.setting.length, goal.at_most) for goal in goals} == documented(threads)
    assert len(goals) == len(documented(threads)) >= 3


def test_default_run_has_every_goals_setting() -> None:
    cases = {case.name: case for case in choose(["model"])}
    for goal in GOALS:
        batch, lengths = getattr(cases[goal.case], goal.setting.device)
        assert batch == goal.setting.batch
        assert goal.setting.length in lengths


def test_a_goal_is_for_its_setting_and_threads_alone() -> None:
    setting = Setting("small", 1, 2048, new_tokens=5)
    assert largest_ratio("model/decode", setting, threads=2) == 1.10
    assert largest_ratio("model/decode", setting, threads=1) is None
    assert largest_ratio("model/decode", Setting("small", 1, 4096), threads=2) is None
    assert largest_ratio("model/decode", Setting("small", 1, 2048, "bfloat16"), threads=2) is None
    assert largest_ratio("model/decode", Setting("3b", 1, 32768, "bfloat16", "cuda"), threads=16) == 1.0


@pytest.mark.parametrize(
    ("status", "met", "text"),
    [
        (GoalStatus(1.10, 1.10, None), True, "≤ 1.10: met"),
        (GoalStatus(1.11, 1.10, None), False, "≤ 1.10: MISSED"),
        (GoalStatus(1.05, 1.10, 1.05), False, "≤ 1.10 and < 1.05: MISSED"),
        (GoalStatus(1.05, 1.10, 1.06), True, "≤ 1.10 and < 1.06: met"),
        (GoalStatus(1.50, None, 1.40), False, "< 1.40: MISSED"),
        (GoalStatus(1.50, None, None), None, ""),
    ],
)
def test_goal_status_names_every_limit_and_whether_all_are_met(status: GoalStatus, met: bool | None, text: str) -> None:
    assert (status.met, str(status)) == (met, text)


def test_goal_status_exists_for_our_implementations_only() -> None:
    v1, v2 = Implementation("v1", "diff_attention"), Implementation("v2")
    ratios = {Implementation("llama"): 1.0, Implementation("transformers"): 1.3, v1: 1.2, v2: 1.05}
    statuses = goal_statuses("model/decode", Setting("small", 1, 2048), 2, ratios)
    assert {name: status.met for name, status in statuses.items()} == {v1: False, v2: True}
    assert all(status.below == 1.3 for status in statuses.values())
