# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Activation outliers: the largest attention logits and hidden states, and their medians."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from matplotlib.ticker import LogFormatter
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from diffllama.evaluation.attention import AttentionCall, watched
from diffllama.evaluation.datasets.data import Source, texts
from diffllama.evaluation.figures import COLOURS, finish, panels
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Measurement, Outcome, Probe, Report, Row
from diffllama.evaluation.settings import OutliersSettings


RANKS = (1, 2, 3, 10, 100)
"""Ranks of the largest magnitudes in the report."""

KINDS = ("attention logits", "hidden states")

DROPPED_BITS = 16
"""Low bits of a float32 that the histogram ignores: it keeps the sign, 8 bits of exponent and 7 of mantissa."""

BINS = 1 << (31 - DROPPED_BITS)


class Magnitudes:
    """The largest of many absolute values, and a histogram by leading bits.

    Attributes:
        top: the largest values, at most `max(RANKS)`, in descending order; exact, in float32.
        counts: number of values by leading bits, [BINS].
    """

    def __init__(self, top: Sequence[float] = (), bits: Sequence[int] = (), counts: Sequence[int] = ()) -> None:
        self.top = torch.tensor([float(value) for value in top])  # infinity is stored as a string
        self.counts = torch.zeros(BINS, dtype=torch.int64)
        self.counts[torch.tensor(bits, dtype=torch.int64)] = torch.tensor(counts, dtype=torch.int64)

    def add(self, values: torch.Tensor) -> None:
        """Add values of any shape."""
        values = values.abs().float().flatten()
        top = values.topk(min(max(RANKS), len(values))).values
        self.merge(top.cpu(), torch.bincount(values.view(torch.int32) >> DROPPED_BITS, minlength=BINS).cpu())

    def merge(self, top: torch.Tensor, counts: torch.Tensor) -> None:
        """Add other magnitudes, given their `top` and `counts`."""
        self.top = torch.cat((self.top, top)).sort(descending=True).values[: max(RANKS)]
        self.counts += counts

    @property
    def median(self) -> float:
        """Lower median to within 0.4 % (2**-8): the middle of the histogram's bin that contains it."""
        bits = int((2 * self.counts.cumsum(0) < self.counts.sum()).sum())
        middle = (bits << DROPPED_BITS) + (1 << (DROPPED_BITS - 1))
        return torch.tensor(middle, dtype=torch.int32).view(torch.float32).item()

    def values(self) -> dict[str, float]:
        """Return the report's metrics. Needs at least `max(RANKS)` values."""
        return {f"top-{rank}": self.top[rank - 1].item() for rank in RANKS} | {"median": self.median}

    def detail(self) -> dict[str, list[Any]]:
        """Return the arguments that recreate this object, for JSON."""
        bits = self.counts.nonzero()[:, 0]
        return {"top": self.top.tolist(), "bits": bits.tolist(), "counts": self.counts[bits].tolist()}


def magnitudes(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, Magnitudes]:
    """Compute the magnitudes of all attention logits and all layers' outputs for token ids [1, n]."""
    logits, states = Magnitudes(), Magnitudes()

    def look(call: AttentionCall) -> None:
        for rows in call.blocks():
            logits.add(call.logits(rows)[0][:, call.visible(rows)[0, 0]])

    def hook(layer: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        states.add(output)

    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    hooks = [layer.register_forward_hook(hook) for layer in layers]
    try:
        with torch.inference_mode(), watched(model, look):
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in hooks:
            handle.remove()
    return dict(zip(KINDS, (logits, states), strict=True))


class Outliers(OutliersSettings, Probe[list[int]]):
    """Largest magnitudes and median of attention logits and hidden states.

    Attention logits are |q·k| · scaling for every pair of a query and a key that it sees, in every layer and head (in
    both maps of a differential head). Hidden states are all elements of every layer's output, after both residual
    connections. Both definitions are the authors' (microsoft/unilm, issue 1666). The paper does not say how it cuts its
    text. Here texts are cut into sequences of equal length, each after the BOS token: the first sequence of every text,
    then the second, and so on.

    The largest values are exact, the median to within 0.4 %. There are no bootstrap intervals, because no resample
    exceeds the maximum. A large key gives a large logit with every query that sees it, and all of them count. So do
    both maps of a head: an exact conversion has every logit twice, so its top-2 is the original's top-1.
    """

    dataset: ClassVar[str] = "novels"
    intervals: ClassVar[bool] = False

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, list[int]]:
        """Return sequences from the texts, as token ids.

        Raises:
            ValueError: no text has `length` tokens.
        """
        long_texts, pieces, size = texts(source), -(-self.tokens // self.length), self.length - len(loaded.prefix)
        each = -(-pieces // len(long_texts))
        ids = {name: loaded.encode(text[: 16 * size * each]) for name, text in long_texts.items()}
        samples = {
            f"{name} {start}": loaded.prefix + ids[name][start : start + size]
            for start in range(0, size * each, size)
            for name in long_texts
            if start + size <= len(ids[name])
        }
        if not samples:
            raise ValueError(f"No text in {source.path} has {self.length:,} tokens. Lower --length.")
        return dict(islice(samples.items(), pieces))

    def measure(self, loaded: LoadedModel, samples: Mapping[str, list[int]]) -> Iterator[Outcome]:
        """Compute the magnitudes of each sequence, which `rows` adds up."""
        for name, ids in samples.items():
            by_kind = magnitudes(loaded.model, loaded.tensor(ids))
            yield Outcome(name, [], {kind: kind_magnitudes.detail() for kind, kind_magnitudes in by_kind.items()})

    def rows(self, measured: Sequence[Mapping[str, Outcome]]) -> list[Row]:
        """Return one row per kind of activation, for all sequences together."""
        together = []
        for outcomes in measured:
            numbers = {kind: magnitudes.values() for kind, magnitudes in totals(outcomes).items()}
            measurements = [Measurement({"activation": kind}, values) for kind, values in numbers.items()]
            together.append({"all": Outcome("all", measurements)})
        return [row | {"samples": len(measured[0])} for row in super().rows(together)]

    def draw(self, report: Report, figure: Any) -> None:
        """Draw magnitudes by rank, and the median as a dashed line, for each kind of activation."""
        by_model = {name: totals(outcomes) for name, outcomes in zip(report.names, report.outcomes, strict=True)}
        for axes, kind in zip(panels(figure, len(KINDS)), KINDS, strict=True):
            for index, (name, kinds) in enumerate(by_model.items()):
                style: dict[str, Any] = {"color": COLOURS[index], "linewidth": 3 / (index + 1)}  # equal: both show
                axes.plot(range(1, max(RANKS) + 1), kinds[kind].top, **style, label=f"{name}, largest")
                axes.axhline(kinds[kind].median, **style, linestyle="--", label=f"{name}, median")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(RANKS, [str(rank) for rank in RANKS])
            for labelled in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                labelled(LogFormatter())
            finish(axes, "rank of the magnitude", "magnitude", kind)


def totals(outcomes: Mapping[str, Outcome]) -> dict[str, Magnitudes]:
    """Add up the magnitudes of all samples of a model, by kind of activation."""
    totals = {kind: Magnitudes() for kind in KINDS}
    for outcome in outcomes.values():
        for kind, total in totals.items():
            part = Magnitudes(**outcome.detail[kind])
            total.merge(part.top, part.counts)
    return totals
