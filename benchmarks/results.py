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
from benchmarks.correctness import CorrectnessError
from benchmarks.cost import floors
from benchmarks.goals import GoalStatus, goal_statuses
from benchmarks.implementations import REFERENCE, Implementation, Setting
from benchmarks.measure import Spread, Step, alternate, peak_memory, ratios, seconds


Clock = Callable[[Callable[[], Any]], float]

ENOUGH = 0.5
"""Seconds. A step that takes less is repeated within a round, so often or ten times, and the best time counts."""


@dataclass(frozen=True)
class Row:
    """Of one implementation: seconds, their ratio to the reference's in each round, tokens per second, bytes."""

    times: list[float]
    seconds: Spread
    ratio: Spread
    tokens_per_second: float
    peak: int | None
    kept: dict[str, int]
    goal_status: GoalStatus | None


@dataclass(frozen=True)
class Result:
    """Of a case at a setting: rows, and why implementations were refused."""

    case: Case
    setting: Setting
    rows: dict[Implementation, Row]
    refused: dict[Implementation, str]


def best(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Least time of several calls, in seconds."""
    return min(seconds(run, device) for _ in range(repeats))


def prepare(
    case: Case, setting: Setting, compared: Sequence[Implementation]
) -> tuple[dict[Implementation, Step], dict[Implementation, str]]:
    """Makes and checks steps. Those of one architecture share a model.

    Returns:
        Steps of the implementations that compute what they must, and why the others are refused.
    """
    loaded: dict[str, Any] = {}
    steps: dict[Implementation, Step] = {}
    refused: dict[Implementation, str] = {}
    for implementation in compared:
        try:
            if implementation.architecture not in loaded:
                loaded[implementation.architecture] = case.build(implementation.architecture, setting)
            step = case.step(loaded[implementation.architecture], implementation.attention)
            step.check()
        except CorrectnessError as error:
            refused[implementation] = str(error)
        except Exception as error:  # whatever an attention function raises where it cannot compute something
            refused[implementation] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            steps[implementation] = step
    return steps, refused


def measure(
    case: Case, setting: Setting, compared: Sequence[Implementation], rounds: int, clock: Clock | None = None
) -> Result:
    """Checks, warms up, measures memory, then times all implementations in turn.

    Args:
        case: what.
        setting: where.
        compared: implementations, the reference among them.
        rounds: how often each is timed.
        clock: measures a call in seconds; wall-clock time by default.
    """
    steps, refused = prepare(case, setting, list(filter(case.applies, compared)))
    if REFERENCE not in steps:
        return Result(case, setting, {}, refused)
    first, peaks = {}, {}
    for implementation, step in steps.items():
        step.before()
        seconds(step.run, setting.device)  # the first call allocates, compiles and loads
        first[implementation] = seconds(step.run, setting.device)
        peaks[implementation] = peak_memory(step.run, setting.device)
    repeats = max(1, min(10, int(ENOUGH / first[REFERENCE])))
    clock = clock or partial(best, device=setting.device, repeats=repeats)
    times = alternate(steps, rounds, clock)
    compared_with = ratios(times, REFERENCE)
    statuses = goal_statuses(
        case.name, setting, torch.get_num_threads(), {name: ratio.median for name, ratio in compared_with.items()}
    )
    rows = {
        implementation: Row(
            times[implementation],
            Spread.of(times[implementation]),
            compared_with[implementation],
            case.tokens(setting) / median(times[implementation]),
            peaks[implementation],
            step.kept(),
            statuses.get(implementation),
        )
        for implementation, step in steps.items()
    }
    return Result(case, setting, rows, refused)


def shown(result: Result) -> Group:
    """A result as it is printed: a table, and who was refused."""
    refused = [Text(f"Refused: {implementation}: {why}", style="red") for implementation, why in result.refused.items()]
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
    for implementation, row in result.rows.items():
        times, ratio = row.seconds, row.ratio
        made.add_row(
            str(implementation),
            f"{times.median * 1e3:.4g} ({times.least * 1e3:.4g} to {times.most * 1e3:.4g})",
            f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})",
            f"{row.tokens_per_second:,.4g}" if row.tokens_per_second < 1e4 else f"{row.tokens_per_second:,.0f}",
            "" if row.peak is None else f"{row.peak / 1e6:,.1f}",
            "" if row.goal_status is None else str(row.goal_status),
        )
    return made


def entry(result: Result) -> dict[str, Any]:
    """For JSON: times in milliseconds, memory in MB."""

    def scaled(spread: Spread, factor: float = 1.0) -> dict[str, float]:
        return {name: number * factor for name, number in asdict(spread).items()}

    implementations: dict[str, dict[str, Any]] = {}
    for implementation, row in result.rows.items():
        implementations[str(implementation)] = {
            "milliseconds": scaled(row.seconds, 1e3) | {"rounds": [time * 1e3 for time in row.times]},
            "ratio": scaled(row.ratio),
            "tokens_per_second": row.tokens_per_second,
            "step_mb": None if row.peak is None else row.peak / 1e6,
            **{f"{name}_mb": size / 1e6 for name, size in row.kept.items()},
        }
        if row.goal_status is not None:
            implementations[str(implementation)]["goal"] = {
                "at_most": row.goal_status.at_most,
                "below": row.goal_status.below,
                "met": row.goal_status.met,
            }
    made: dict[str, Any] = {"case": result.case.name, **asdict(result.setting), "implementations": implementations}
    if result.case.floor:
        made["by_arithmetic"] = floors(result.case.floor)
    return made | {"refused": {str(implementation): why for implementation, why in result.refused.items()}}
