# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Many-shot classification: accuracy by the number of demonstrations in the context."""

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
"""Separates demonstrations. It ends every answer, so that no answer is the beginning of another."""


@dataclass(frozen=True)
class Trial(Prompt):
    """A prompt, its condition, and its correct class."""

    condition: Condition
    label: str


class InContext(InContextSettings, Probe[Trial]):
    """Classification of test questions after demonstrations, which are training examples of the same data set.

    Prompts and decoding are those of Bertsch et al. (arXiv 2405.00200), whose protocol the paper follows: `Question: …`
    and `Type: …` for each demonstration, then a question without its type, and greedy decoding constrained to the names
    of the classes. Each demonstration is tokenized separately. Training examples whose text is also a test question are
    left out, and so are CLINC150's out-of-scope texts.
    """

    @property
    def dataset(self) -> str:
        """Name of the data in `find`: the same for both tasks of TREC."""
        return self.task.removesuffix("-fine")

    @abstractmethod
    def choose(self, train: list[Example]) -> Sequence[Example]:
        """Order the training examples. The first ones that fit become the demonstrations."""

    @abstractmethod
    def arrange(self, demonstrations: list[Example]) -> Iterator[tuple[Condition, Sequence[Example]]]:
        """Yield each condition and the demonstrations of its context, in order."""

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Trial]:
        """Return every drawn test question in every condition.

        Raises:
            ValueError: no demonstration fits into `length` tokens.
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
            raise ValueError(f"No demonstration fits into {self.length:,} tokens. Raise --length.")
        trials = {}
        for condition, arranged in self.arrange(demonstrations):
            context = loaded.prefix + [token for example in arranged for token in ids[example]]
            name = ", ".join(f"{key} {value}" for key, value in condition.items())
            for index, tokens in asked.items():
                trials[f"{name}, question {index}"] = Trial(context, tokens, options, condition, test[index].label)
        return trials

    def measure(self, loaded: LoadedModel, samples: Mapping[str, Trial]) -> Iterator[Outcome]:
        """Classify the questions. Accuracy is 1 for the correct class, else 0."""
        for name, answer in classify(loaded, samples):
            trial = samples[name]
            accuracy = Measurement(trial.condition, {"accuracy": answer == trial.label})
            yield Outcome(name, [accuracy], {"label": trial.label, "answer": answer})


class ManyShot(ManyShotSettings, InContext):
    """Accuracy with 1, 2, 4, … demonstrations, and with as many as fit into `length` tokens.

    Demonstrations are drawn at random, not balanced by class. A larger number begins with the demonstrations of a
    smaller one. Each seed makes one draw, which has a large effect if demonstrations are few; intervals are over test
    questions only. The paper does not say how it draws.
    """

    def choose(self, train: list[Example]) -> Sequence[Example]:
        """Return all examples in a random order."""
        return random.Random(f"{self.seed}:demonstrations").sample(train, len(train))

    def arrange(self, demonstrations: list[Example]) -> Iterator[tuple[Condition, Sequence[Example]]]:
        """Yield the first 1, 2, 4, … demonstrations, and all of them."""
        count = len(demonstrations)
        for shots in [2**power for power in range(count.bit_length()) if 2**power < count] + [count]:
            yield {"task": self.task, "shots": shots}, demonstrations[:shots]

    def draw(self, report: Report, figure: Any) -> None:
        """Draw one line per model, over the number of demonstrations on a logarithmic axis."""
        (axes,) = panels(figure, 1)
        shots = [row["condition"]["shots"] for row in report.rows]
        lines(axes, shots, report.points("accuracy"))
        axes.set_xscale("log", base=2)
        powers = [count for count in shots if count.bit_count() == 1]
        axes.set_xticks(powers, [f"{count:,}" for count in powers])
        title = f"{self.task}, up to {shots[-1]:,} demonstrations"
        finish(axes, "demonstrations", "accuracy (share of test questions)", title)
