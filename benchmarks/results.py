# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a case at a setting, and formats the results."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from benchmarks.cases import Case
from benchmarks.correctness import CorrectnessError
from benchmarks.cost import floors
from benchmarks.goals import describe, goal_status
from benchmarks.implementations import Implementation, Setting
from benchmarks.measure import Step, in_turn, peak_memory, seconds, spread


Clock = Callable[[Callable[[], Any]], float]

ENOUGH = 0.5
"""Seconds per round. A shorter step is repeated up to ten times within a round, and its shortest time counts."""


def prepare(
    case: Case, setting: Setting, compared: Sequence[Implementation]
) -> tuple[dict[Implementation, Step], dict[str, str]]:
    """Build and check the steps of all implementations. Those of one architecture share a model.

    Returns:
        Steps of the implementations that pass the check, and the reason for each refused one, by its name.
    """
    loaded: dict[str, Any] = {}
    steps: dict[Implementation, Step] = {}
    refused: dict[str, str] = {}
    for implementation in compared:
        try:
            if implementation.architecture not in loaded:
                loaded[implementation.architecture] = case.build(implementation.architecture, setting)
            step = case.step(loaded[implementation.architecture], implementation.attention)
            step.before()
            step.check()
        except CorrectnessError as error:
            refused[str(implementation)] = str(error)
        except Exception as error:  # attention functions raise any type for inputs that they do not support
            refused[str(implementation)] = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            steps[implementation] = step
    return steps, refused


def measure(
    case: Case, setting: Setting, compared: Sequence[Implementation], rounds: int, clock: Clock | None = None
) -> dict[str, Any]:
    """Check and warm up all implementations, measure their peak memory, then time them in turn.

    Args:
        case: the case to measure.
        setting: sizes, dtype and device.
        compared: implementations, including their references. One whose reference is refused is not timed.
        rounds: number of rounds; each implementation is timed once per round.
        clock: measures a call in seconds; wall-clock time by default.

    Returns:
        The entry of this case and setting in the file of `--json`: a row per timed implementation, with times in
        milliseconds and memory in MB, and the reason for each refused one.
    """
    supported = [implementation for implementation in compared if implementation.architecture in case.architectures]
    steps, refused = prepare(case, setting, supported)
    rows: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {"case": case.name, **asdict(setting), "implementations": rows}
    group, _, name = case.name.partition("/")
    if group == "attention":
        record["by_arithmetic"] = floors(name)
    record["refused"] = refused
    steps = {implementation: step for implementation, step in steps.items() if implementation.reference in steps}
    if not steps:
        return record

    first, peaks = {}, {}
    for implementation, step in steps.items():
        step.before()
        seconds(step.run, setting.device)  # warm-up: the first call allocates and compiles
        first[implementation] = seconds(step.run, setting.device)
        peaks[implementation] = peak_memory(step.run, setting.device)
    repeats = max(1, min(10, int(ENOUGH / next(iter(first.values())))))
    clock = clock or (lambda run: min(seconds(run, setting.device) for _ in range(repeats)))
    times: dict[Implementation, list[float]] = {implementation: [] for implementation in steps}
    for _, implementation in in_turn(steps, rounds):
        steps[implementation].before()
        times[implementation].append(1e3 * clock(steps[implementation].run))

    # Ratios of times of the same round: a slowdown of the whole machine during a round cancels out.
    ratios = {}
    for implementation, values in times.items():
        baseline = times[implementation.reference]
        ratios[implementation] = spread([time / other for time, other in zip(values, baseline, strict=True)])
    transformers_model = Implementation("transformers")
    for implementation, step in steps.items():
        milliseconds, peak = spread(times[implementation]), peaks[implementation]
        row = rows[str(implementation)] = {
            "milliseconds": milliseconds | {"rounds": times[implementation]},
            "ratio": ratios[implementation],
            "tokens_per_second": 1e3 * step.tokens / milliseconds["median"],
            "step_mb": None if peak is None else peak / 1e6,
            **{f"{name}_mb": size / 1e6 for name, size in step.kept().items()},
        }
        if implementation.ours:
            threads, ratio = torch.get_num_threads(), row["ratio"]["median"]
            comparable = implementation.reference == transformers_model.reference and transformers_model in ratios
            below = ratios[transformers_model]["median"] if comparable else None
            row["goal"] = goal_status(case.name, setting, threads, ratio, below)
    return record


def format_record(case: Case, setting: Setting, record: dict[str, Any]) -> Group:
    """Return a record as a table of times, ratios, speed and memory, followed by the refused implementations."""
    table = Table(
        "",
        *(
            Column(name, justify="right")
            for name in ("ms (min to max)", "× llama (min to max)", "tokens/s", "peak memory, MB")
        ),
        "goal",
        title=f"{case.name}: {case.about} ({setting})",
        title_justify="left",
        caption_justify="left",
    )
    if shares := record.get("by_arithmetic", {}).items():
        table.caption = "FLOPs of attention, × llama: " + ", ".join(f"{way} {share:.2f}" for way, share in shares)
    for name, row in record["implementations"].items():
        speed = row["tokens_per_second"]
        table.add_row(
            name,
            "{median:.4g} ({least:.4g} to {most:.4g})".format(**row["milliseconds"]),
            "{median:.2f} ({least:.2f} to {most:.2f})".format(**row["ratio"]),
            f"{speed:,.4g}" if speed < 1e4 else f"{speed:,.0f}",
            "" if row["step_mb"] is None else f"{row['step_mb']:,.1f}",
            describe(row["goal"]) if "goal" in row else "",
        )
    refused = [Text(f"Refused: {name}: {why}", style="red") for name, why in record["refused"].items()]
    return Group(table, *refused, "")
