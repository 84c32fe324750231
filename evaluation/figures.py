# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The style of figures: a palette for colour-blind readers, lines, bars and labels."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, ordered so that neighbours also differ in print."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Point = dict[str, float]
"""`mean` and, where there is an interval, `low` and `high`."""


def panels(figure: Figure, count: int, width: float = 5.2, rows: int = 1) -> list[Axes]:
    """Add `count` axes in `rows` rows to a figure and set its size, in inches."""
    columns = -(-count // rows)
    figure.set_size_inches(width * columns, 3.8 * rows)
    figure.set_layout_engine("constrained")
    return [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def lines(axes: Axes, x: Sequence[float], curves: Mapping[str, Sequence[Point]]) -> None:
    """Plot means over x, a labelled line for each curve, with a band where all its points have intervals.

    The first line is the widest, so that it shows under a line of equal means.
    """
    for index, (label, points) in enumerate(curves.items()):
        size = 1 / (index + 1)
        style = {"linewidth": 4 * size, "markersize": 9 * size**0.5, "marker": MARKERS[index % 7]}
        axes.plot(x, [point["mean"] for point in points], color=COLOURS[index % 7], label=label, **style)
        if all("low" in point for point in points):
            low, high = ([point[side] for point in points] for side in ("low", "high"))
            axes.fill_between(x, low, high, color=COLOURS[index % 7], alpha=0.15, linewidth=0)


def bars(axes: Axes, ticks: Sequence[str], groups: Mapping[str, Sequence[Point]]) -> None:
    """Plot means as bars at each tick, the labelled groups side by side, and intervals, if any, as thin lines."""
    width = 0.8 / len(groups)
    axes.set_axisbelow(True)
    for index, (label, points) in enumerate(groups.items()):
        x = [place + (index - (len(groups) - 1) / 2) * width for place in range(len(ticks))]
        axes.bar(x, [point["mean"] for point in points], width, color=COLOURS[index % 7], label=label)
        for at, point in zip(x, points, strict=True):
            if "low" in point:
                axes.plot([at, at], [point["low"], point["high"]], color="black", linewidth=1)
    axes.set_xticks(range(len(ticks)), ticks)


def finish(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    """Add axis labels, a title, a grid and, if something is labelled, a legend."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
