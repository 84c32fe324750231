# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The goals, and whether a result meets them."""

from typing import Any

from benchmarks.implementations import Setting


GOALS = {
    ("model/decode", Setting("small", 1, 2048)): 1.10,
    ("model/decode", Setting("small", 1, 8192)): 1.10,
    ("model/prefill", Setting("small", 1, 2048)): 1.15,
    ("model/train", Setting("small", 2, 512)): 1.10,
    ("model/decode", Setting("3b", 1, 32768, "bfloat16", "cuda")): 1.0,
    ("model/prefill", Setting("3b", 1, 4096, "bfloat16", "cuda")): 1 / 0.95,
    ("model/train", Setting("3b", 1, 4096, "bfloat16", "cuda")): 1 / 0.95,
}
"""(Case, setting) -> largest ratio of our time to the matched Llama's; on a CPU, with `THREADS` threads."""

THREADS = 2


def goal_status(case: str, setting: Setting, threads: int, ratio: float, below: float | None) -> dict[str, Any]:
    """Compare a result of ours with its limits.

    Args:
        case: name of the case.
        setting: sizes, dtype and device.
        threads: number of CPU threads.
        ratio: our time divided by the Llama's.
        below: the ratio of transformers' `diffllama`, if it was timed: ours must be faster in every case.

    Returns:
        `at_most`, the goal or `None`; `below`; and `met`, whether the ratio meets both limits, `None` without limits.
    """
    at_most = GOALS.get((case, setting)) if setting.device == "cuda" or threads == THREADS else None
    met = [ratio <= at_most] if at_most is not None else []
    met += [ratio < below] if below is not None else []
    return {"at_most": at_most, "below": below, "met": all(met) if met else None}


def describe(goal: dict[str, Any]) -> str:
    """Format the limits of a `goal_status` and whether all are met. Returns an empty string if there are none."""
    limits = [f"{sign} {goal[name]:.2f}" for sign, name in (("≤", "at_most"), ("<", "below")) if goal[name] is not None]
    return f"{' and '.join(limits)}: {'met' if goal['met'] else 'MISSED'}" if limits else ""
