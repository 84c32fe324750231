import re
from pathlib import Path

import pytest

from benchmarks.cases import DEFAULT, choose
from benchmarks.goals import GOALS, describe, goal_status
from benchmarks.implementations import Setting


PAGE = (Path(__file__).parents[2] / "docs/performance.md").read_text(encoding="utf-8")


def documented(device: str) -> set[tuple[str, int, int, float]]:
    """Return case, sequences, tokens and largest ratio of the goals in the page's table."""
    goals = set()
    for case, cpu, gpu in re.findall(r"^\| `(model/\w+)` \| (.*) \| (.*) \|$", PAGE, re.MULTILINE):
        ratio, where = re.fullmatch(r"(.+) \((.+) tokens\)", gpu if device == "cuda" else cpu).groups()
        number, _, share = ratio.partition(" / ")
        for tokens in where.replace(",", "").split(" and "):
            batch, _, length = tokens.rpartition(" × ")
            goals.add((case, int(batch or 1), int(length), float(number) / float(share or 1)))
    return goals


def test_documentation_has_the_goals() -> None:
    for device in ("cpu", "cuda"):
        goals = {(case, at.batch, at.length, ratio) for (case, at), ratio in GOALS.items() if at.device == device}
        assert goals == documented(device)
        assert len(goals) >= 3


def test_default_run_has_every_goals_setting() -> None:
    cases = {case.name: case for case in choose(DEFAULT)}
    for case, setting in GOALS:
        batch, lengths = getattr(cases[case], setting.device)
        assert batch == setting.batch
        assert setting.length in lengths


SMALL = Setting("small", 1, 2048, new_tokens=5)


@pytest.mark.parametrize(
    ("setting", "threads", "ratio", "below", "text"),
    [
        (SMALL, 2, 1.10, None, "≤ 1.10: met"),
        (SMALL, 2, 1.11, None, "≤ 1.10: MISSED"),
        (SMALL, 2, 1.05, 1.05, "≤ 1.10 and < 1.05: MISSED"),
        (SMALL, 2, 1.05, 1.06, "≤ 1.10 and < 1.06: met"),
        (SMALL, 1, 1.50, 1.40, "< 1.40: MISSED"),
        (SMALL, 1, 1.50, None, ""),
        (Setting("small", 1, 4096), 2, 1.50, None, ""),
        (Setting("small", 1, 2048, "bfloat16"), 2, 1.50, None, ""),
        (Setting("3b", 1, 32768, "bfloat16", "cuda"), 16, 1.0, None, "≤ 1.00: met"),
    ],
)
def test_goal_names_the_limits_of_its_setting_and_threads_and_whether_all_are_met(
    setting: Setting, threads: int, ratio: float, below: float | None, text: str
) -> None:
    goal = goal_status("model/decode", setting, threads, ratio, below)
    assert describe(goal) == text
    assert goal["met"] is {"": None, "met": True, "MISSED": False}[text.rpartition(" ")[2]]
