# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Collect the numbers of a study's runs, format them as Markdown tables, and draw figures."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import track

from diffllama.checkpoints.versions import versions
from diffllama.evaluation.figures import COLOURS, MARKERS, bars, finish, lines, panels

from .runs import Run
from .values import Value, over_seeds


CURVES = {
    "eval_loss": "loss on held-out sequences (nats per token)",
    "diff_lambda": "λ, mean over layers and heads",
    "diff_map_overlap": "part of the first map that the second cancels",
}
"""What a run logs, and its axis label."""

LINES = ("-", "--", "-.", ":")

Row = dict[str, Any]
"""`measure`, `condition`, and `arms`: for each arm its numbers over seeds, see `over_seeds`."""


def collect(
    settings: Mapping[str, Any],
    sizes: Mapping[str, int],
    grid: Sequence[Run],
    chosen: Sequence[Run],
    measure: Callable[[Run], list[Value]],
) -> dict[str, Any]:
    """Measure the chosen runs, and return the study's results as JSON.

    Args:
        settings: the track's settings.
        sizes: parameters of each arm.
        grid: the runs with every learning rate.
        chosen: each arm's runs with its learning rate, of every seed in order.
        measure: measures a run.
    """
    losses: dict[str, dict[str, float]] = {arm: {} for arm in sizes}
    for run in grid:
        losses[run.arm][f"{run.learning_rate:g}"] = run.held_out_loss
    curves: dict[str, dict[str, Any]] = {name: {} for name in CURVES}
    rows: dict[str, Row] = {}
    for run in track(chosen, "Measuring"):
        for name, by_arm in curves.items():
            if points := run.logged(name):
                by_arm.setdefault(run.arm, {})[run.seed] = [[tokens, round(value, 5)] for tokens, value in points]
        held_out = Value("held-out loss", {"tokens": run.tokens}, run.held_out_loss)
        for value in [held_out, *measure(run)]:
            empty = {"measure": value.measure, "condition": value.condition, "arms": {arm: [] for arm in sizes}}
            row = rows.setdefault(f"{value.measure} {value.condition}", empty)
            row["arms"][run.arm].append(value.number)
    return {
        "settings": settings,
        "versions": versions(),
        "parameters": sizes,
        "held-out losses of the first seed": losses,
        "learning rates": {run.arm: run.learning_rate for run in chosen},
        "rows": [
            row | {"arms": {arm: over_seeds(numbers) for arm, numbers in row["arms"].items()}} for row in rows.values()
        ],
        "curves": curves,
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def cell(numbers: Mapping[str, Any]) -> str:
    """Format the mean with half of its interval, and below it each seed's number."""
    half = f" ± {numbers['high'] - numbers['mean']:.2g}" if "high" in numbers else ""
    return f"{numbers['mean']:.4g}{half}<br>({', '.join(f'{number:.4g}' for number in numbers['seeds'])})"


def tables(results: Mapping[str, Any]) -> str:
    """Format the results as two Markdown tables: losses at each learning rate, and all measures."""
    losses = results["held-out losses of the first seed"]
    rates = [f"{rate:g}" for rate in results["settings"]["learning_rates"]]
    chosen = {arm: f"{rate:g}" for arm, rate in results["learning rates"].items()}
    arms = [
        [
            arm,
            f"{size:,}",
            *(f"**{losses[arm][rate]:.4f}**" if rate == chosen[arm] else f"{losses[arm][rate]:.4f}" for rate in rates),
        ]
        for arm, size in results["parameters"].items()
    ]
    body = [[row["measure"], condition(row["condition"]), *map(cell, row["arms"].values())] for row in results["rows"]]
    return "\n".join(
        [
            table(["arm", "parameters", *(f"held-out loss at {rate}" for rate in rates)], arms),
            table(["measure", "condition", *results["parameters"]], body),
        ]
    )


def condition(values: Mapping[str, Any]) -> str:
    """Format a condition."""
    return ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{value}" for name, value in values.items())


def select(results: Mapping[str, Any], measure: str, **condition: Any) -> list[Row]:
    """Return the rows of a measure whose conditions have these values."""
    return [
        row for row in results["rows"] if row["measure"] == measure and condition.items() <= row["condition"].items()
    ]


def draw_means(axes: Axes, results: Mapping[str, Any], rows: Sequence[Row], name: str) -> None:
    """Draw each arm's mean over a numeric condition as a line, and each seed's number as a dot."""
    x = [row["condition"][name] for row in rows]
    lines(axes, x, {arm: [{"mean": row["arms"][arm]["mean"]} for row in rows] for arm in results["parameters"]})
    for at, arm in enumerate(results["parameters"]):
        for place, row in zip(x, rows, strict=True):
            numbers = row["arms"][arm]["seeds"]
            axes.plot([place] * len(numbers), numbers, ".", color=COLOURS[at], markersize=4)


def draw_bars(axes: Axes, results: Mapping[str, Any], rows: Sequence[Row], name: str) -> None:
    """Draw each arm's mean and the range of its seeds for each value of a condition."""
    ranges = {
        arm: [
            {"mean": numbers["mean"], "low": min(numbers["seeds"]), "high": max(numbers["seeds"])}
            for numbers in (row["arms"][arm] for row in rows)
        ]
        for arm in results["parameters"]
    }
    bars(axes, [str(row["condition"][name]) for row in rows], ranges)
    axes.margins(y=0.4)  # room for the legend above the bars


def draw_curves(results: Mapping[str, Any], figure: Figure) -> None:
    """Draw what runs logged, a line for each seed, not smoothed."""
    drawn = {name: arms for name, arms in results["curves"].items() if arms}
    styles = {arm: index for index, arm in enumerate(results["parameters"])}
    for axes, (name, arms) in zip(panels(figure, len(drawn)), drawn.items(), strict=True):
        for arm, seeds in arms.items():
            at = styles[arm]
            for number, points in enumerate(seeds.values()):
                tokens, values = zip(*points, strict=True)
                axes.plot(
                    [count / 1e6 for count in tokens],
                    values,
                    color=COLOURS[at],
                    linestyle=LINES[at],
                    marker=MARKERS[at],
                    markevery=max(1, len(points) // 6),
                    markersize=4,
                    linewidth=1,
                    label=None if number else arm,
                )
        finish(axes, "million tokens", CURVES[name])


def picture(draw: Callable[[Mapping[str, Any], Figure], None], results: Mapping[str, Any]) -> bytes:
    """Draw results, and return the PNG file."""
    figure, image = Figure(), io.BytesIO()
    draw(results, figure)
    figure.savefig(image, dpi=110, format="png")
    return image.getvalue()
