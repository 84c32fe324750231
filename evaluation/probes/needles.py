# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-needle retrieval: find cities' magic numbers in long texts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np

from diffllama.evaluation.datasets.data import Source, texts
from diffllama.evaluation.datasets.haystack import CITIES, Haystack, Prompt
from diffllama.evaluation.figures import finish, panels
from diffllama.evaluation.likelihood import completions
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Measurement, Outcome, Probe, Report, Row, averages_over
from diffllama.evaluation.settings import NeedlesSettings


@dataclass(frozen=True)
class Task:
    """A prompt and its condition."""

    prompt: Prompt
    condition: dict[str, Any]


class Needles(NeedlesSettings, Probe[Task]):
    """Multi-needle retrieval: a text gives N cities magic numbers, and the question asks for R of them.

    The first requested needle is at the condition's depth, the others are at random depths. The accuracy is the
    fraction of the R requested numbers found in the first line of the answer. Generation is greedy, without a chat
    template: the prompt ends with the beginning of the answer.
    """

    dataset: ClassVar[str] = "novels"

    def pairs(self) -> dict[str, tuple[int, int]]:
        """Return N and R of each entry of `needles`.

        Raises:
            ValueError: an entry is not `R_of_N`.
        """
        pairs = {}
        for entry in self.needles:
            match = re.fullmatch(r"(\d+)_of_(\d+)", entry)
            queries, needles = map(int, match.groups()) if match else (0, 0)
            if not 0 < queries <= needles <= len(CITIES):
                raise ValueError(
                    f"--needles must be R_of_N, such as 2_of_6, with R ≤ N ≤ {len(CITIES)}, got {entry!r}."
                )
            pairs[entry] = needles, queries
        return pairs

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Task]:
        """Return prompts, with the same text, cities and numbers at every depth."""
        pairs = self.pairs()
        haystack = Haystack(texts(source).values(), loaded, max(self.length))
        return {
            f"{entry} {length} {depth} {number}": Task(
                haystack.prompt(
                    length=length,
                    depth=depth,
                    needles=needles,
                    queries=queries,
                    seed=f"{self.seed} {entry} {length} {number}",
                ),
                {"needles": entry, "length": length, "depth": depth},
            )
            for entry, (needles, queries) in pairs.items()
            for length in self.length
            for depth in self.depth
            for number in range(self.samples_per_condition)
        }

    def answer_tokens(self, loaded: LoadedModel, queries: int) -> int:
        """Return the maximum number of tokens of an answer with `queries` numbers."""
        return queries * len(loaded.encode(" 1234567 and")) + 4

    def tokens_at_once(self, loaded: LoadedModel, samples: Mapping[str, Task]) -> int:
        """Return the tokens of the longest prompt and the longest answer."""
        return max(self.length) + max(self.answer_tokens(loaded, queries) for _, queries in self.pairs().values())

    def measure(self, loaded: LoadedModel, samples: Mapping[str, Task]) -> Iterator[Outcome]:
        """Generate an answer of one line to each prompt."""
        for queries in sorted({queries for _, queries in self.pairs().values()}):
            prompts = {
                name: loaded.prefix + loaded.encode(task.prompt.text)
                for name, task in samples.items()
                if len(task.prompt.numbers) == queries
            }
            tokens = self.answer_tokens(loaded, queries)
            for name, text in completions(loaded, prompts, tokens, self.batch_tokens, stop=["\n"]):
                prompt, condition = samples[name].prompt, samples[name].condition
                accuracy = Measurement(condition, {"accuracy": prompt.fraction_found(text)})
                yield Outcome(name, [accuracy], {"answer": text, "numbers": prompt.numbers})

    def rows(self, measured: Sequence[Mapping[str, Outcome]]) -> list[Row]:
        """Return averages of each condition, then over all depths, where a sample is one text at every depth."""
        texts = [
            averages_over("depth", outcomes, lambda name, outcome: str(outcome.detail["numbers"]))
            for outcomes in measured
        ]
        everywhere = super().rows(texts)
        for row in everywhere:
            row["condition"]["depth"] = "all"
        return super().rows(measured) + everywhere

    def draw(self, report: Report, figure: Any) -> None:
        """Draw depth × length heat maps, a row for each entry of `needles` and a column for each model."""
        models, entries = len(report.names), len(self.needles)
        grid = panels(figure, entries * models, 1.5 + 0.9 * len(self.length), rows=entries)
        for axes, (entry, model) in zip(grid, product(self.needles, range(models)), strict=True):
            values = [
                [
                    report.select(needles=entry, length=length, depth=depth)[0]["models"][model]["accuracy"]["mean"]
                    for length in self.length
                ]
                for depth in self.depth
            ]
            axes.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
            axes.set_xticks(range(len(self.length)), [f"{length:,}" for length in self.length])
            axes.set_yticks(range(len(self.depth)), [f"{depth:.0%}" for depth in self.depth])
            for (row, column), value in np.ndenumerate(values):
                colour = "black" if value > 0.5 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize="small")
            finish(axes, "length (tokens)", "depth of the answer", f"{report.names[model]}\naccuracy, {entry}")
            axes.grid(visible=False)
