# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""How steps are measured: in turn, and the most memory that one takes."""

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch


K = TypeVar("K", bound=Hashable)


def nothing() -> None:
    """For steps that need no preparation."""


@dataclass(frozen=True)
class Step:
    """What is measured.

    Args:
        run: what is timed.
        check: raises `CorrectnessError` unless what is timed computes what it must.
        before: prepares each call of `run`; not timed.
        kept: bytes that exist before and after each step, by name.
    """

    run: Callable[[], Any]
    check: Callable[[], None]
    before: Callable[[], Any] = nothing
    kept: Callable[[], dict[str, int]] = dict


@dataclass(frozen=True)
class Spread:
    """Median, least and most of several numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        """These numbers'."""
        return cls(statistics.median(numbers), min(numbers), max(numbers))


def seconds(run: Callable[[], Any], device: str) -> float:
    """Wall-clock time of a call, until the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def alternate(
    steps: Mapping[K, Step], rounds: int, clock: Callable[[Callable[[], Any]], float]
) -> dict[K, list[float]]:
    """Times every step once in each round; every round begins with another one.

    Returns:
        For each step, what `clock` says of its `run` in each round.
    """
    names = list(steps)
    times: dict[K, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            steps[name].before()
            times[name].append(clock(steps[name].run))
    return times


def ratios(times: Mapping[K, Sequence[float]], reference: K) -> dict[K, Spread]:
    """Of each step's time to the reference's in the same round: what slows a whole round down cancels."""
    return {
        name: Spread.of([own / other for own, other in zip(values, times[reference], strict=True)])
        for name, values in times.items()
    }


def resident(field: str) -> int:
    """Bytes of memory of this process, by a field of Linux' /proc/self/status: VmRSS now, VmHWM at most."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_memory(run: Callable[[], Any], device: str) -> int | None:
    """The most bytes that a call takes at a time besides what is taken before it.

    On a GPU what torch allocates; on the CPU memory of the process, which Linux counts, and `None` elsewhere.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed and is kept for later would hide as much of the step's
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    except (OSError, AttributeError):
        return None
    before = resident("VmRSS")
    run()
    return max(resident("VmHWM") - before, 0)
