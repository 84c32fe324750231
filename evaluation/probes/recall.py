# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss of tokens that repeat an n-gram of their context (associative recall), and of all other tokens."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffllama.evaluation.datasets.data import Source, texts
from diffllama.evaluation.figures import bars, finish, panels
from diffllama.evaluation.likelihood import token_log_probs
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.context import LongTextProbe
from diffllama.evaluation.runs import Measurement, Outcome, Report, Row
from diffllama.evaluation.settings import RecallSettings


SLICES = ("AR-hit", "others", "all")


def ngrams(ids: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    """Return all overlapping n-grams, in order."""
    return zip(*(ids[start:] for start in range(n)), strict=False)


def repeated(ids: Sequence[int], n: int) -> dict[int, tuple[int, ...]]:
    """Return the n-grams that occurred earlier in the sequence, overlapping or not, by the position of their end."""
    first: dict[tuple[int, ...], int] = {}
    return {at: gram for at, gram in enumerate(ngrams(ids, n), n - 1) if first.setdefault(gram, at) < at}


@dataclass(frozen=True)
class Text:
    """A text's token ids, and the positions of its AR-hits."""

    ids: list[int]
    hits: list[int]


class Recall(RecallSettings, LongTextProbe[Text]):
    """Average negative log-likelihood of slices of the tokens, after Zoology (arXiv 2312.04927).

    AR-hit (associative recall): the token ends an n-gram that occurred earlier in the same text. Others: all other
    tokens but the first, which nothing predicts. Zoology also counts as others the tokens that end an n-gram found more
    than 1,250 times in the training text, because a model may have memorized it. Here the training text is unknown:
    with `frequent`, occurrences are counted in the data's other texts instead. Averages are over tokens; their
    intervals come from resampling the texts.
    """

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Text]:
        """Return the beginnings of texts, and where they repeat an n-gram.

        Raises:
            ValueError: `frequent` is set, and there are no other texts to count in.
        """
        beginnings = self.beginnings(source, loaded)
        repetitions = {name: repeated(ids, self.n) for name, ids in beginnings.items()}
        common: set[tuple[int, ...]] = set()
        if self.frequent is not None:
            others = [text for name, text in texts(source).items() if name not in beginnings]
            if not others:
                raise ValueError(f"--frequent needs other texts than the {len(beginnings)} measured. Lower --texts.")
            wanted = {gram for grams in repetitions.values() for gram in grams.values()}
            counts = Counter(gram for text in others for gram in ngrams(loaded.encode(text), self.n) if gram in wanted)
            common = {gram for gram, count in counts.items() if count > self.frequent}
        return {
            name: Text(ids, [at for at, gram in repetitions[name].items() if gram not in common])
            for name, ids in beginnings.items()
        }

    def measure(self, loaded: LoadedModel, samples: Mapping[str, Text]) -> Iterator[Outcome]:
        """Average each slice of a text, weighted by its number of tokens."""
        for name, text in samples.items():
            losses = -token_log_probs(loaded.model, loaded.tensor(text.ids)).double()
            hit = torch.zeros(len(text.ids), dtype=torch.bool)
            hit[text.hits] = True
            slices = dict(zip(SLICES, (losses[hit[1:]], losses[~hit[1:]], losses), strict=True))
            measurements = [
                Measurement({"slice": slice}, {"nll": nll.mean()}, len(nll))
                for slice, nll in slices.items()
                if len(nll)
            ]
            yield Outcome(name, measurements)

    def rows(self, measured: Sequence[Mapping[str, Outcome]]) -> list[Row]:
        """Return the averages, with the number of averaged tokens as `tokens`."""
        rows = super().rows(measured)
        for row in rows:
            weights = [
                {
                    name: measurement.weight
                    for name, text in texts.items()
                    for measurement in text.measurements
                    if measurement.condition == row["condition"]
                }
                for texts in measured
            ]
            shared = set.intersection(*map(set, weights))  # the averages are over these texts
            for numbers, tokens in zip(row["models"], weights, strict=True):
                numbers["tokens"] = {"mean": sum(tokens[name] for name in shared)}
        return sorted(rows, key=lambda row: SLICES.index(row["condition"]["slice"]))

    def draw(self, report: Report, figure: Any) -> None:
        """Draw a bar per model for each slice."""
        (axes,) = panels(figure, 1)
        bars(axes, [row["condition"]["slice"] for row in report.rows], report.points("nll"))
        finish(axes, f"slice of the tokens ({self.n}-grams)", "NLL (nats per token)")
