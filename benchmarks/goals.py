# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Goals, and whether a result meets them."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.implementations import REFERENCE, Implementation, Setting


@dataclass(frozen=True)
class Goal:
    """The largest ratio of our time to the matched Llama's.

    Args:
        case: name.
        setting: where it holds.
        at_most: the ratio.
        threads: of the CPU; `None` on a GPU.
    """

    case: str
    setting: Setting
    at_most: float
    threads: int | None = None


def on_two_cores(case: str, batch: int, length: int, at_most: float) -> Goal:
    """A goal in float32 for the small shape."""
    return Goal(case, Setting("small", batch, length), at_most, threads=2)


def on_a_gpu(case: str, length: int, speed: float) -> Goal:
    """A goal in bfloat16 for the paper's 3B shape.

    Args:
        case: name.
        length: tokens.
        speed: least share of the Llama's tokens per second.
    """
    return Goal(case, Setting("3b", 1, length, "bfloat16", "cuda"), 1 / speed)


GOALS = (
    on_two_cores("model/decode", 1, 2048, 1.10),
    on_two_cores("model/decode", 1, 8192, 1.10),
    on_two_cores("model/prefill", 1, 2048, 1.15),
    on_two_cores("model/train", 2, 512, 1.10),
    on_a_gpu("model/decode", 32768, 1.0),
    on_a_gpu("model/prefill", 4096, 0.95),
    on_a_gpu("model/train", 4096, 0.95),
)


def largest_ratio(case: str, setting: Setting, threads: int) -> float | None:
    """The largest ratio that is allowed here, if there is a goal."""
    for goal in GOALS:
        if (goal.case, goal.setting) == (case, setting) and goal.threads in (None, threads):
            return goal.at_most
    return None


@dataclass(frozen=True)
class GoalStatus:
    """How a result of ours compares with its targets.

    Args:
        ratio: its time to the Llama's.
        at_most: the goal, if there is one.
        below: the ratio of transformers' `diffllama`, if it was timed: ours must be faster in every case.
    """

    ratio: float
    at_most: float | None
    below: float | None

    @property
    def met(self) -> bool | None:
        """Whether every target is met; `None` if there is none."""
        targets = [self.at_most is None or self.ratio <= self.at_most, self.below is None or self.ratio < self.below]
        return None if self.at_most is None and self.below is None else all(targets)

    def __str__(self) -> str:
        limits = [f"≤ {self.at_most:.2f}"] if self.at_most is not None else []
        limits += [f"< {self.below:.2f}"] if self.below is not None else []
        return "" if self.met is None else f"{' and '.join(limits)}: {'met' if self.met else 'MISSED'}"


def goal_statuses(
    case: str, setting: Setting, threads: int, ratios: Mapping[Implementation, float]
) -> dict[Implementation, GoalStatus]:
    """Those of all our implementations."""
    at_most = largest_ratio(case, setting, threads)
    below = ratios.get(Implementation("transformers", REFERENCE.attention))
    return {ours: GoalStatus(ratio, at_most, below) for ours, ratio in ratios.items() if ours.ours}
