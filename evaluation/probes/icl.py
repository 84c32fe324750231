# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Many-shot classification: accuracy with more and more demonstrations in the context."""

import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffllama.evaluation.datasets.classification import TASKS, Example, Prompt, classify, option_ids, read_examples
from diffllama.evaluation.datasets.data import Source
from diffllama.evaluation.figures import finish, lines, panels
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Condition, Measurement, Outcome, Probe, Report
from diffllama.evaluation.settings import InContextSettings, ManyShotSettings


SEPARATOR = "\n==\n"
"""Between demonstrations. Every answer ends in it, so that no answer begins with another."""


@dataclass(frozen=True)
class Trial(Prompt):
    """A prompt of a condition, and the class that is right."""

    condition: Condition
    label: str


class InContext(InContextSettings, Probe[Trial]):
    """Classification of test questions after demonstrations, training examples of the same data set.

    Prompts and decoding are those of Bertsch et al. (arXiv 2405.00200), whose protocol the paper follows: `Question: …`
    and `Type: …` for each demonstration, at the end a question without its type, and greedy decoding that is
    constrained to the classes' names. Each demonstration is tokenised by itself. Training examples whose text is also a
    test question are left out. CLINC150 is used without its texts that are out of scope.
    """

    @property
    def dataset(self) -> str:
        """TREC is one data set, with whichever classes."""
        return self.task.removesuffix("-fine")

    @abstractmethod
    def choose(self, train: list[Example]) -> Sequence[Example]:
        """Training examples in the order in which they are taken for demonstrations, as long as they fit."""

    @abstractmethod
    def arrange(self, demonstrations: list[Example]) -> Iterator[tuple[Condition, Sequence[Example]]]:
        """Demonstrations as they stand in each condition's context."""

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Trial]:
        """Every test question in every condition.

        Raises:
            ValueError: not even one demonstration fits.
        """
        train, test = read_examples(self.task, source)
        words = TASKS[self.task]
        labels = sorted({example.label for example in train})
        options = option_ids(loaded, f"{words.label}:", {label: f" {label}{SEPARATOR}" for label in labels})

        def question(example: Example) -> list[int]:
            return loaded.encode(f"{words.text}: {example.text}\n{words.label}:")

        picked = sorted(self.drawn(range(len(test)), self.questions, "questions"))
        asked = {index: question(test[index]) for index in picked}
        room = self.length - len(loaded.prefix) - max(map(len, asked.values())) - max(map(len, options.values()))
        ids: dict[Example, list[int]] = {}
        demonstrations = []
        for example in self.choose(train):
            ids[example] = question(example) + options[example.label]
            room -= len(ids[example])
            if room < 0:
                break
            demonstrations.append(example)
        if not demonstrations:
            raise ValueError(f"No demonstration fits into {self.length:,} tokens. Ask for more with --length.")
        trials = {}
        for condition, arranged in self.arrange(demonstrations):
            context = loaded.prefix + [token for example in arranged for token in ids[example]]
            name = ", ".join(f"{key} {value}" for key, value in condition.items())
            for index, tokens in asked.items():
                trials[f"{name}, question {index}"] = Trial(context, tokens, options, condition, test[index].label)
        return trials

    def measure(self, loaded: LoadedModel, samples: Mapping[str, Trial]) -> Iterator[Outcome]:
        """Accuracy: 1 for the right class, 0 for another."""
        for name, answer in classify(loaded, samples):
            trial = samples[name]
            accuracy = Measurement(trial.condition, {"accuracy": answer == trial.label})
            yield Outcome(name, [accuracy], {"label": trial.label, "answer": answer})


class ManyShot(ManyShotSettings, InContext):
    """Accuracy with 1, 2, 4, … demonstrations, and with as many as fit into the length.

    Demonstrations are drawn at random, not balanced by class, and a larger number begins with those of a smaller one.
    There is one draw for each seed: intervals are over test questions, and the draw matters much where demonstrations
    are few. The paper does not say how it draws.
    """

    def choose(self, train: list[Example]) -> Sequence[Example]:
        """All in a random order."""
        return random.Random(f"{self.seed}:demonstrations").sample(train, len(train))

    def arrange(self, demonstrations: list[Example]) -> Iterator[tuple[Condition, Sequence[Example]]]:
        """The first 1, 2, 4, …, and all."""
        count = len(demonstrations)
        for shots in [2**power for power in range(count.bit_length()) if 2**power < count] + [count]:
            yield {"task": self.task, "shots": shots}, demonstrations[:shots]

    def draw(self, report: Report, figure: Any) -> None:
        """One line a model, over demonstrations on a logarithmic axis."""
        (axes,) = panels(figure, 1)
        shots = [row["condition"]["shots"] for row in report.rows]
        lines(axes, shots, report.points("accuracy"))
        axes.set_xscale("log", base=2)
        powers = [count for count in shots if count.bit_count() == 1]
        axes.set_xticks(powers, [f"{count:,}" for count in powers])
        title = f"{self.task}, up to {shots[-1]:,} demonstrations"
        finish(axes, "demonstrations", "accuracy (share of test questions)", title)
