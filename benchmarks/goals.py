# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Goals, and whether a result meets them."""

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
"""Case and setting -> the largest ratio of our time to the matched Llama's; on a CPU, with `THREADS` threads."""

THREADS = 2


def goal_status(case: str, setting: Setting, threads: int, ratio: float, below: float | None) -> dict[str, Any]:
    """How a result of ours compares with its targets.

    Args:
        case: name of what was timed.
        setting: where.
        threads: of the CPU.
        ratio: its time to the Llama's.
        below: the ratio of transformers' `diffllama`, if it was timed: ours must be faster in every case.

    Returns:
        `at_most`, the goal, if there is one; `below`; and `met`, whether it keeps to both, `None` if there is neither.
    """
    at_most = GOALS.get((case, setting)) if setting.device == "cuda" or threads == THREADS else None
    kept = [ratio <= at_most] if at_most is not None else []
    kept += [ratio < below] if below is not None else []
    return {"at_most": at_most, "below": below, "met": all(kept) if kept else None}


def describe(goal: dict[str, Any]) -> str:
    """Every limit of a `goal_status`, and whether all are kept; empty if there is none."""
    limits = [f"{sign} {goal[name]:.2f}" for sign, name in (("≤", "at_most"), ("<", "below")) if goal[name] is not None]
    return f"{' and '.join(limits)}: {'met' if goal['met'] else 'MISSED'}" if limits else ""
