# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Benefit of a longer context: the average loss of the tokens up to each position."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

import torch

from diffllama.evaluation.datasets.data import Source, texts
from diffllama.evaluation.figures import finish, lines, panels
from diffllama.evaluation.likelihood import token_log_probs
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Measurement, Outcome, Probe, Report, S
from diffllama.evaluation.settings import ContextSettings, LongTextSettings


class LongTextProbe(LongTextSettings, Probe[S]):
    """Measures the beginnings of long texts."""

    dataset: ClassVar[str] = "novels"

    def beginnings(self, source: Source, loaded: LoadedModel) -> dict[str, list[int]]:
        """Return the beginnings of the first texts that are long enough, as token ids.

        Raises:
            ValueError: no text is long enough.
        """
        encoded = (
            (name, loaded.prefix + loaded.encode(text[: self.length * 16])) for name, text in texts(source).items()
        )
        long_enough = ((name, ids[: self.length]) for name, ids in encoded if len(ids) >= self.length)
        beginnings = dict(islice(long_enough, self.texts))
        if not beginnings:
            raise ValueError(f"No text in {source.path} has {self.length:,} tokens. Lower --length.")
        return beginnings


class Context(ContextSettings, LongTextProbe[list[int]]):
    """Cumulative average negative log-likelihood by position, on long texts."""

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, list[int]]:
        """Return the beginnings of texts, as token ids."""
        return self.beginnings(source, loaded)

    @property
    def positions(self) -> list[int]:
        """Positions to report: powers of two from 16 on, and the length."""
        return [2**power for power in range(4, self.length.bit_length()) if 2**power < self.length] + [self.length]

    def measure(self, loaded: LoadedModel, samples: Mapping[str, list[int]]) -> Iterator[Outcome]:
        """Average the loss up to each position, without the first token, which nothing predicts."""
        for name, ids in samples.items():
            losses = -token_log_probs(loaded.model, loaded.tensor(ids)).double()
            means = losses.cumsum(0) / torch.arange(1, len(losses) + 1)
            yield Outcome(name, [Measurement({"position": at}, {"nll": means[at - 2]}) for at in self.positions])

    def draw(self, report: Report, figure: Any) -> None:
        """Draw one line per model, over positions on a logarithmic axis."""
        (axes,) = panels(figure, 1)
        positions = [row["condition"]["position"] for row in report.rows]
        lines(axes, positions, report.points("nll"))
        axes.set_xscale("log", base=2)
        axes.set_xticks(positions, [f"{position:,}" for position in positions], rotation=45)
        finish(axes, "position (tokens)", "cumulative average NLL (nats per token)")
