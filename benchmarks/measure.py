# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the time and peak memory of steps."""

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
    """A step to measure.

    Args:
        run: function to time.
        check: raises `CorrectnessError` if the results of the step are wrong.
        tokens: number of tokens that `run` processes.
        before: prepares each call of `run` and `check`; not timed.
        kept: returns the bytes of tensors that exist before and after each step, by name.
    """

    run: Callable[[], Any]
    check: Callable[[], None]
    tokens: int
    before: Callable[[], Any] = lambda: None
    kept: Callable[[], dict[str, int]] = dict


def spread(numbers: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum ("least") and maximum ("most") of several numbers."""
    return {"median": statistics.median(numbers), "least": min(numbers), "most": max(numbers)}


def seconds(run: Callable[[], Any], device: str) -> float:
    """Return the wall-clock time of a call in seconds, including the work that it queues on a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(names: Iterable[K], rounds: int) -> Iterator[tuple[int, K]]:
    """Yield (number of the round, name) for every name in every round. Each round starts with the next name."""
    turns = list(names)
    for number in range(rounds):
        yield from ((number, name) for name in turns)
        turns = turns[1:] + turns[:1]


def resident(field: str) -> int:
    """Return the resident memory of this process in bytes: VmRSS (now) or VmHWM (peak) of /proc/self/status."""
    match = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def peak_memory(run: Callable[[], Any], device: str) -> int | None:
    """Return the peak memory of a call in bytes, beyond the memory in use before it.

    On a GPU this is the memory allocated by PyTorch; on a CPU, the resident memory of the process under Linux, and
    `None` on other systems.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system: the step would reuse it unseen
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    except (OSError, AttributeError):
        return None
    before = resident("VmRSS")
    run()
    return max(resident("VmHWM") - before, 0)
