# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Robustness of classification accuracy to the order of the demonstrations."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from diffllama.evaluation.datasets.classification import Example
from diffllama.evaluation.figures import COLOURS, MARKERS, finish, panels
from diffllama.evaluation.probes.icl import InContext
from diffllama.evaluation.runs import RESAMPLES, Condition, Outcome, Report, Row, averages_over
from diffllama.evaluation.settings import ShotOrderSettings


def shuffled(examples: Sequence[Example], draw: random.Random) -> list[Example]:
    """Return all examples in a random order."""
    return draw.sample(examples, len(examples))


def by_class(examples: Sequence[Example], draw: random.Random) -> list[list[Example]]:
    """Group examples by class. Classes, and the examples of each, are in a random order."""
    classes: dict[str, list[Example]] = {}
    for example in shuffled(examples, draw):
        classes.setdefault(example.label, []).append(example)
    return draw.sample(list(classes.values()), len(classes))


def alternate(examples: Sequence[Example], draw: random.Random) -> list[Example]:
    """Space each class's examples equally, starting at a random offset within the first interval.

    If all classes have equally many examples, they alternate in the same order in every round.
    """
    places = []
    for members in by_class(examples, draw):
        start = draw.random()
        places += [((number + start) / len(members), example) for number, example in enumerate(members)]
    return [example for _, example in sorted(places, key=itemgetter(0))]


def answers(outcomes: Mapping[str, Outcome], condition: Condition) -> np.ndarray:
    """Return the accuracies in a condition, order by order; every order has the same sequence of questions."""
    measurements = [measurement for outcome in outcomes.values() for measurement in outcome.measurements]
    matching = [item for item in measurements if condition.items() <= item.condition.items()]
    return np.array([measurement.values["accuracy"] for measurement in matching])


def spread(accuracies: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the best and worst of accuracies [..., orders] and their difference, the margin: each [...]."""
    best, worst = accuracies.max(-1), accuracies.min(-1)
    return {"best": best, "worst": worst, "margin": best - worst}


def by_chance(correct: np.ndarray, seed: int) -> float:
    """Compute the mean margin of answers [orders, questions] after shuffling each question's among the orders."""
    draw = np.random.default_rng(seed)
    return float(np.mean([spread(draw.permuted(correct, axis=0).mean(1))["margin"] for _ in range(RESAMPLES)]))


class ShotOrder(ShotOrderSettings, InContext):
    """Accuracy over permutations of the same demonstrations, in random order and alternating by class.

    As many demonstrations as fit into `length` tokens are used, balanced by class as far as possible. Both arrangements
    use the same ones: `random` shuffles them, `alternating` alternates the classes (see `alternate`). The paper does
    not say how it chooses demonstrations, or how many it uses.

    Best and worst accuracy differ even if the order has no effect, and more so with fewer questions. `chance` is the
    mean margin after shuffling every question's answers among the orders. The interval of the accuracy is over test
    questions. Best, worst and margin have no interval, because resampling widens the margin.
    """

    def choose(self, train: list[Example]) -> Sequence[Example]:
        """Take one example of each class in turn, skipping classes that have no more."""
        turns = zip_longest(*by_class(train, random.Random(f"{self.seed}:demonstrations")))
        return [example for turn in turns for example in turn if example]

    def arrange(self, demonstrations: list[Example]) -> Iterator[tuple[Condition, Sequence[Example]]]:
        """Yield the permutations of both arrangements."""
        for name, permute in (("random", shuffled), ("alternating", alternate)):
            for order in range(self.orders):
                draw = random.Random(f"{self.seed}:{name}:{order}")
                condition = {"task": self.task, "arrangement": name, "shots": len(demonstrations), "order": order}
                yield condition, permute(demonstrations, draw)

    def rows(self, measured: Sequence[Mapping[str, Outcome]]) -> list[Row]:
        """Return one row per arrangement. `orders` has each model's accuracy in every order.

        Raises:
            ValueError: different numbers of demonstrations fit for the two models.
        """
        by_question = [
            averages_over("order", outcomes, lambda name, _: name.rpartition(", question ")[2]) for outcomes in measured
        ]
        rows = super().rows(by_question)
        if not rows:
            raise ValueError(
                "Different numbers of demonstrations fit with the tokenizers of the two models. Measure each alone, "
                "without --compare."
            )
        for row in rows:
            correct = [answers(outcomes, row["condition"]).reshape(self.orders, -1) for outcomes in measured]
            row["orders"] = [by_order.mean(1).tolist() for by_order in correct]
            spreads = [spread(by_order.mean(1)) | {"chance": by_chance(by_order, self.seed)} for by_order in correct]
            for numbers, metrics in zip(row["models"], spreads, strict=True):
                numbers |= {name: {"mean": float(value)} for name, value in metrics.items()}
            if len(spreads) == 2:
                first, second = spreads
                row["difference"] |= {name: {"mean": float(second[name] - first[name])} for name in first}
        return rows

    def draw(self, report: Report, figure: Any) -> None:
        """Draw a panel for each arrangement: a dot for each order, lines at each model's best and worst."""
        both = panels(figure, len(report.rows), width=4.2)
        both[1].sharey(both[0])
        for axes, row in zip(both, report.rows, strict=True):
            for index, values in enumerate(row["orders"]):
                places = index + np.linspace(-0.2, 0.2, len(values))
                axes.scatter(places, values, color=COLOURS[index % 7], marker=MARKERS[index % 7], zorder=2)
                for edge in ("best", "worst"):
                    level = row["models"][index][edge]["mean"]
                    axes.hlines(level, index - 0.3, index + 0.3, color=COLOURS[index % 7], linestyle="dashed")
            margins = [model["margin"]["mean"] for model in row["models"]]
            ticks = [f"{name}\nmargin {margin:.3f}" for name, margin in zip(report.names, margins, strict=True)]
            axes.set_xticks(range(len(ticks)), ticks)
            axes.set_xlim(-0.6, len(ticks) - 0.4)
            condition = row["condition"]
            title = f"{condition['task']}, {condition['shots']:,} demonstrations, {condition['arrangement']}"
            finish(axes, "", "accuracy (share of test questions)", title)
