# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a case at a setting, and shows what came out."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from benchmarks.cases import Case
from benchmarks.correctness import Wrong
from benchmarks.cost import floors
from benchmarks.goals import Mark, marks
from benchmarks.measure import Spread, Step, alternate, peak_memory, ratios, seconds
from benchmarks.peers import REFERENCE, Peer, Setting


Clock = Callable[[Callable[[], Any]], float]

ENOUGH = 0.5
"""Seconds. A step that takes less is repeated within a round, so often or ten times, and the best time counts."""


@dataclass(frozen=True)
class Row:
    """What came out for one peer: seconds, their ratio to the reference's in each round, tokens per second, bytes."""

    times: list[float]
    seconds: Spread
    ratio: Spread
    tokens_per_second: float
    peak: int | None
    kept: dict[str, int]
    mark: Mark | None


@dataclass(frozen=True)
class Result:
    """Of a case at a setting: rows, and why peers were refused."""

    case: Case
    setting: Setting
    rows: dict[Peer, Row]
    refused: dict[Peer, str]


def best(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Least time of several calls, in seconds."""
    return min(seconds(run, device) for _ in range(repeats))


def prepare(case: Case, setting: Setting, compared: Sequence[Peer]) -> tuple[dict[Peer, Step], dict[Peer, str]]:
    """Makes and checks steps. Those of one architecture share a model.

    Returns:
        Steps of the peers that compute what they must, and why the others are refused.
    """
    subjects: dict[str, Any] = {}
    steps: dict[Peer, Step] = {}
    refused: dict[Peer, str] = {}
    for peer in compared:
        try:
            if peer.architecture not in subjects:
                subjects[peer.architecture] = case.build(peer.architecture, setting)
            step = case.step(subjects[peer.architecture], peer.implementation)
            step.check()
        except Wrong as error:
            refused[peer] = str(error)
        except Exception as error:  # whatever an attention function raises where it cannot compute something
            refused[peer] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            steps[peer] = step
    return steps, refused


def measure(case: Case, setting: Setting, compared: Sequence[Peer], rounds: int, clock: Clock | None = None) -> Result:
    """Checks, warms up, measures memory, then times all peers in turn.

    Args:
        case: what.
        setting: where.
        compared: peers, the reference among them.
        rounds: how often each is timed.
        clock: measures a call in seconds; wall-clock time by default.
    """
    steps, refused = prepare(case, setting, [peer for peer in compared if case.applies(peer)])
    if REFERENCE not in steps:
        return Result(case, setting, {}, refused)
    first, peaks = {}, {}
    for peer, step in steps.items():
        step.before()
        seconds(step.run, setting.device)  # the first call allocates, compiles and loads
        first[peer] = seconds(step.run, setting.device)
        peaks[peer] = peak_memory(step.run, setting.device)
    repeats = max(1, min(10, int(ENOUGH / first[REFERENCE])))
    clock = clock or partial(best, device=setting.device, repeats=repeats)
    times = alternate(steps, rounds, clock)
    compared_with = ratios(times, REFERENCE)
    marked = marks(
        case.name, setting, torch.get_num_threads(), {peer: ratio.median for peer, ratio in compared_with.items()}
    )
    rows = {
        peer: Row(
            times[peer],
            Spread.of(times[peer]),
            compared_with[peer],
            case.tokens(setting) / median(times[peer]),
            peaks[peer],
            step.kept(),
            marked.get(peer),
        )
        for peer, step in steps.items()
    }
    return Result(case, setting, rows, refused)


def shown(result: Result) -> Group:
    """A result as it is printed: a table, and who was refused."""
    refused = [Text(f"Refused: {peer}: {why}", style="red") for peer, why in result.refused.items()]
    return Group(table(result), *refused, "")


def table(result: Result) -> Table:
    """Times, ratios, speed and memory of all that were timed."""
    title = f"{result.case.name}: {result.case.about} ({result.setting})"
    numbers = ("ms (least to most)", "× llama (least to most)", "tokens/s", "peak, MB")
    made = Table(
        "",
        *(Column(name, justify="right") for name in numbers),
        "goal",
        title=title,
        title_justify="left",
        caption_justify="left",
    )
    if result.case.floor:
        shares = floors(result.case.floor)
        made.caption = "By arithmetic, × llama: " + ", ".join(f"{way} {share:.2f}" for way, share in shares.items())
    for peer, row in result.rows.items():
        times, ratio = row.seconds, row.ratio
        made.add_row(
            str(peer),
            f"{times.median * 1e3:.4g} ({times.least * 1e3:.4g} to {times.most * 1e3:.4g})",
            f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})",
            f"{row.tokens_per_second:,.4g}" if row.tokens_per_second < 1e4 else f"{row.tokens_per_second:,.0f}",
            "" if row.peak is None else f"{row.peak / 1e6:,.1f}",
            "" if row.mark is None else str(row.mark),
        )
    return made


def entry(result: Result) -> dict[str, Any]:
    """For JSON: times in milliseconds, memory in MB."""

    def scaled(spread: Spread, factor: float = 1.0) -> dict[str, float]:
        return {name: number * factor for name, number in asdict(spread).items()}

    peers: dict[str, dict[str, Any]] = {}
    for peer, row in result.rows.items():
        peers[str(peer)] = {
            "milliseconds": scaled(row.seconds, 1e3) | {"rounds": [time * 1e3 for time in row.times]},
            "ratio": scaled(row.ratio),
            "tokens_per_second": row.tokens_per_second,
            "step_mb": None if row.peak is None else row.peak / 1e6,
            **{f"{name}_mb": size / 1e6 for name, size in row.kept.items()},
        }
        if row.mark is not None:
            peers[str(peer)]["goal"] = {"at_most": row.mark.at_most, "theirs": row.mark.theirs, "met": row.mark.met}
    made: dict[str, Any] = {"case": result.case.name, **asdict(result.setting), "peers": peers}
    if result.case.floor:
        made["by_arithmetic"] = floors(result.case.floor)
    return made | {"refused": {str(peer): why for peer, why in result.refused.items()}}
