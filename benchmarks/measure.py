# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""How steps are measured: in turn, and the most memory that one takes."""

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch


K = TypeVar("K")


@dataclass(frozen=True)
class Step:
    """What is measured.

    Args:
        run: what is timed.
        check: raises `CorrectnessError` unless what is timed computes what it must.
        tokens: that it computes.
        before: prepares each call of `run` and `check`; not timed.
        kept: bytes that exist before and after each step, by name.
    """

    run: Callable[[], Any]
    check: Callable[[], None]
    tokens: int
    before: Callable[[], Any] = lambda: None
    kept: Callable[[], dict[str, int]] = dict


def spread(numbers: Sequence[float]) -> dict[str, float]:
    """Median, least and most of several numbers."""
    return {"median": statistics.median(numbers), "least": min(numbers), "most": max(numbers)}


def seconds(run: Callable[[], Any], device: str) -> float:
    """Wall-clock time of a call, until the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(names: Iterable[K], rounds: int) -> Iterator[tuple[int, K]]:
    """Rounds of all names, each with its round's number from 0; every round begins with another name."""
    turns = list(names)
    for number in range(rounds):
        yield from ((number, name) for name in turns)
        turns = turns[1:] + turns[:1]


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
