# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Goals, and whether a result meets them."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.peers import REFERENCE, Peer, Setting


@dataclass(frozen=True)
class Goal:
    """The largest ratio of our time to the matched Llama's.

    Args:
        case: name.
        setting: where it is wanted.
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


def goal(case: str, setting: Setting, threads: int) -> float | None:
    """The largest ratio that is wanted here, if there is a goal."""
    for one in GOALS:
        if (one.case, one.setting) == (case, setting) and one.threads in (None, threads):
            return one.at_most
    return None


@dataclass(frozen=True)
class Mark:
    """How a result of ours compares with what is wanted.

    Args:
        ratio: its time to the Llama's.
        at_most: the goal, if there is one.
        theirs: the ratio of transformers' `diffllama`, if it was timed: ours are to be faster in every case.
    """

    ratio: float
    at_most: float | None
    theirs: float | None

    @property
    def met(self) -> bool | None:
        """Whether all that is wanted is there; `None` if nothing is."""
        wanted = [self.at_most is None or self.ratio <= self.at_most, self.theirs is None or self.ratio < self.theirs]
        return None if self.at_most is None and self.theirs is None else all(wanted)

    def __str__(self) -> str:
        limits = [f"≤ {self.at_most:.2f}"] if self.at_most is not None else []
        limits += [f"< {self.theirs:.2f}"] if self.theirs is not None else []
        return "" if self.met is None else f"{' and '.join(limits)}: {'met' if self.met else 'MISSED'}"


def marks(case: str, setting: Setting, threads: int, ratios: Mapping[Peer, float]) -> dict[Peer, Mark]:
    """Of all results of ours."""
    at_most, theirs = goal(case, setting, threads), ratios.get(Peer("transformers", REFERENCE.implementation))
    return {peer: Mark(ratio, at_most, theirs) for peer, ratio in ratios.items() if peer.ours}
