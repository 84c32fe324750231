# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Scaling laws fitted to losses, and the relative parameters or tokens with which a DIFF has a Transformer's loss."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy.optimize import least_squares

from diffllama.evaluation.datasets.data import Source, field, read_rows
from diffllama.evaluation.figures import COLOURS, MARKERS, finish, panels
from diffllama.evaluation.models import ModelSpec
from diffllama.evaluation.runs import Condition, Measurement, Outcome, Probe, Report, Row
from diffllama.evaluation.settings import ScalingSettings


LABELS = {"transformer": "Transformer", "diff": "DIFF"}
"""Architecture in the data -> its name in figures."""

FEWEST = 3
"""Minimum number of sizes of each architecture for a curve. With one more, the irreducible loss is fitted, too."""

Points = list[tuple[float, float]]
"""Parameters or tokens, and the loss."""


@dataclass(frozen=True)
class PowerLaw:
    """L(x) = a·x^-b + c."""

    a: float
    b: float
    c: float

    @classmethod
    def fit(cls, points: Points, irreducible: bool) -> "PowerLaw":
        """Fit by least squares: the losses if `irreducible`, from two starts, else their logarithms with c = 0."""
        x, loss = np.array(points).T
        if not irreducible:
            slope, intercept = np.polyfit(np.log(x), np.log(loss), 1)
            return cls(float(np.exp(intercept)), float(-slope), 0.0)
        middle = np.exp(np.log(x).mean())  # in its units, a is about as large as the losses
        bounds = ((0, 1e-3, 0), (np.inf, 10, loss.min()))

        def errors(law: np.ndarray) -> np.ndarray:
            a, b, c = law
            return a * (x / middle) ** -b + c - loss

        starts = [(loss.mean() / 2, b, loss.min() / 2) for b in (0.1, 0.5)]
        fits = [least_squares(errors, start, bounds=bounds, ftol=1e-12, xtol=1e-12, gtol=1e-12) for start in starts]
        a, b, c = map(float, min(fits, key=lambda fit: fit.cost).x)
        return cls(float(a * middle**b), b, c)

    def __call__(self, x: float) -> float:
        """Return the loss at x."""
        return self.a * x**-self.b + self.c

    def inverse(self, loss: float) -> float:
        """Return the x at which the law has this loss; infinity if there is none."""
        if loss <= self.c:
            return math.inf
        with np.errstate(over="ignore", divide="ignore"):
            return float(np.exp(np.log(self.a / (loss - self.c)) / self.b))


@dataclass(frozen=True)
class Curve:
    """Losses to fit, by architecture, and whether to fit the irreducible loss.

    The condition has the variable and what is fixed, such as {"over": "parameters", "tokens": 1e10}.
    """

    condition: Condition
    points: dict[str, Points]
    irreducible: bool

    def measure(self) -> Iterator[Measurement]:
        """Yield the fit to all points, then the fits without each point in turn."""
        yield from self.fit(self.points)
        for name, points in self.points.items():
            for at in range(len(points)):
                yield from self.fit(self.points | {name: points[:at] + points[at + 1 :]})

    def fit(self, points: dict[str, Points]) -> Iterator[Measurement]:
        """Yield both laws, and for each size of a DIFF the size of the Transformer of equal loss."""
        laws = {name: PowerLaw.fit(losses, self.irreducible) for name, losses in points.items()}
        for name, law in laws.items():
            error = math.sqrt(sum((law(x) - loss) ** 2 for x, loss in points[name]) / len(points[name]))
            yield Measurement(self.condition | {"law": name}, asdict(law) | {"rms_error": error})
        for size in sorted({x for x, _ in self.points["diff"]}):
            loss = laws["diff"](size)
            equal = laws["transformer"].inverse(loss)
            values = {"loss": loss, "transformer": equal, "share": size / equal}
            yield Measurement(self.condition | {"diff": size}, values)


def number(row: dict[str, Any], name: str, file: Path) -> float:
    """Return a positive number of a row. Raises `ValueError` if it is something else."""
    value = field(row, name, file)
    try:
        if 0 < float(value) < math.inf:
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{file} has a row in which `{name}` must be a positive number, got {value!r}.")


def curves(file: Path) -> list[Curve]:
    """Read the curves of a file.

    Raises:
        ValueError: a row is invalid, or there is no curve.
    """
    by_condition: dict[str, tuple[Condition, dict[str, Points]]] = {}
    for row in read_rows(file):
        name = str(field(row, "architecture", file)).strip().lower()
        if name not in LABELS:
            raise ValueError(f"{file} has a row in which `architecture` must be transformer or diff, got {name!r}.")
        sizes = {over: number(row, over, file) for over in ("parameters", "tokens") if row.get(over) not in (None, "")}
        if not sizes:
            raise ValueError(f"{file} has a row with neither `parameters` nor `tokens`.")
        for over, x in sizes.items():
            condition = {"over": over} | {other: value for other, value in sizes.items() if other != over}
            _, points = by_condition.setdefault(str(condition), (condition, {name: [] for name in LABELS}))
            points[name].append((x, number(row, "loss", file)))
    fitted = []
    for condition, points in by_condition.values():
        fewest = min(len({x for x, _ in losses}) for losses in points.values())
        if fewest >= FEWEST:
            points = {name: sorted(losses) for name, losses in points.items()}
            for name, losses in points.items():
                if losses[-1][1] >= losses[0][1]:
                    raise ValueError(f"{file} must have losses of {name} that fall with {condition['over']}.")
            fitted.append(Curve(condition, points, irreducible=fewest > FEWEST))
    if not fitted:
        raise ValueError(
            f"{file} has no curve. It needs, for both `transformer` and `diff`, {FEWEST} or more `parameters` with "
            "equal `tokens`, or `tokens` with equal `parameters`."
        )
    return fitted


def fits(outcome: Outcome) -> list[list[Measurement]]:
    """Return the fits to a curve for each condition, that to all points first."""
    by_condition: dict[str, list[Measurement]] = {}
    for measurement in outcome.measurements:
        by_condition.setdefault(str(measurement.condition), []).append(measurement)
    return list(by_condition.values())


def inside(pair: Measurement, points: dict[str, Points]) -> bool:
    """Return whether the Transformer's size of equal loss is in the range of its data."""
    sizes = [x for x, _ in points["transformer"]]
    return min(sizes) <= pair.values["transformer"] <= max(sizes)


class Scaling(ScalingSettings, Probe[Curve]):
    """Power laws L(N) and L(D) fitted to losses, and the sizes at which both architectures have equal loss.

    The data, a file `losses.csv` or `losses.jsonl`, have rows with `architecture` (transformer or diff), `parameters`
    (N) or `tokens` (D) or both, and `loss`. The rows of a curve over one of them have the same value, or none, of the
    other. The built-in sample is made up: a DIFF has the loss of a Transformer with 62.5 % of its parameters, or with
    64 % of its tokens.

    L = a·x^-b + c is fitted by least squares to four or more sizes of an architecture. To three sizes a·x^-b is fitted,
    whose loss falls to 0. `share` is the DIFF's x divided by the Transformer's x of equal loss, both from the fitted
    laws. It is `extrapolated` if the Transformer's x is outside the range of its data. The paper does not describe its
    fit; this one is our own. `low` and `high` are not an interval, but the range of the fits that leave out one point.
    """

    dataset: ClassVar[str] = "scaling"
    intervals: ClassVar[bool] = False

    def specs(self) -> list[ModelSpec]:
        """Return a spec that loads nothing."""
        return [ModelSpec("losses", {}, lambda: None)]

    def samples(self, source: Source, loaded: None) -> Mapping[str, Curve]:
        """Return the curves of the data."""
        file = source.file("losses.csv", "losses.jsonl")
        return {f"curve {number}": curve for number, curve in enumerate(curves(file))}

    def measure(self, loaded: None, samples: Mapping[str, Curve]) -> Iterator[Outcome]:
        """Fit the curves."""
        for name, curve in samples.items():
            yield Outcome(name, list(curve.measure()), {"points": curve.points})

    def rows(self, measured: Sequence[Mapping[str, Outcome]]) -> list[Row]:
        """Return each curve's fit to all points, and the range of the fits without one point."""
        rows = []
        for outcome in measured[0].values():
            points = outcome.detail["points"]
            for whole, *others in fits(outcome):
                numbers = {}
                for metric, value in whole.values.items():
                    every = [value, *(other.values[metric] for other in others)]
                    numbers[metric] = {"mean": value, "low": min(every), "high": max(every)}
                condition = whole.condition
                if "diff" in condition:
                    condition = condition | {"range": "measured" if inside(whole, points) else "extrapolated"}
                rows.append({"condition": condition, "samples": sum(map(len, points.values())), "models": [numbers]})
        return rows

    def draw(self, report: Report, figure: Any) -> None:
        """Draw a panel for each curve, with an arrow from the DIFF's to the Transformer's size of equal loss.

        The arrow is drawn for the largest DIFF for which the Transformer's size is not extrapolated.
        """
        outcomes = report.outcomes[0].values()
        for axes, outcome in zip(panels(figure, len(outcomes)), outcomes, strict=True):
            points = outcome.detail["points"]
            transformer, diff, *pairs = [whole for whole, *_ in fits(outcome)]
            ends = [x for curve_points in points.values() for x, _ in curve_points]
            x = np.geomspace(min(ends), max(ends), 100)
            for index, (name, law) in enumerate(zip(LABELS, (transformer, diff), strict=True)):
                axes.plot(*zip(*points[name], strict=True), MARKERS[index], color=COLOURS[index], label=LABELS[name])
                curve = map(PowerLaw(*(law.values[part] for part in "abc")), x)
                axes.plot(x, list(curve), color=COLOURS[index])
            condition = transformer.condition
            for pair in [pair for pair in pairs if inside(pair, points)][-1:]:
                at, values = (pair.condition["diff"], pair.values["loss"]), pair.values
                axes.annotate("", (values["transformer"], values["loss"]), at, arrowprops={"arrowstyle": "->"})
                label = f"{values['share']:.1%} of the {condition['over']}"
                axes.annotate(label, at, (-4, -4), textcoords="offset points", ha="right", va="top")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:.2f}")
            axes.yaxis.set_minor_formatter("{x:.2f}")
            fixed = [f"{condition[name]:,.0f} {name}" for name in ("parameters", "tokens") if name in condition]
            finish(axes, condition["over"], "loss", *fixed)
