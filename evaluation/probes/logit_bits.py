# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a model whose attention logits are quantized."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch

from diffllama.evaluation.attention import AttentionCall, watched
from diffllama.evaluation.datasets.data import Source
from diffllama.evaluation.datasets.multiple_choice import Item, dataset_name, read
from diffllama.evaluation.figures import finish, lines, panels
from diffllama.evaluation.likelihood import continuation_log_probs, likeliest
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Measurement, Outcome, Probe, Report
from diffllama.evaluation.settings import LogitBitsSettings
from diffllama.modeling_diff.differential_attention import at_least_float32


BITS = (16, 8, 6, 4)
"""Numbers of bits, as in the paper. 16 bits is the unquantized model."""

ITEMS_AT_ONCE = 128
"""Items scored before their outcomes are stored. Many items make large batches of answers of equal length."""


def quantized(values: torch.Tensor, largest: torch.Tensor, bits: int) -> torch.Tensor:
    """Round values to 2^bits - 1 equidistant levels from -`largest` to `largest`."""
    step = largest.clamp_min(1e-30) / (2 ** (bits - 1) - 1)
    return (values / step).round() * step


def quantized_attention(call: AttentionCall, bits: int) -> torch.Tensor:
    """Compute the call's output [b, n, H, D] with logits quantized by each sequence's own largest magnitude."""
    dtype = at_least_float32(call.query.dtype)
    largest = torch.stack(
        [
            call.logits(rows).to(dtype).masked_fill(~call.visible(rows), 0).abs().amax((1, 2, 3), keepdim=True)
            for rows in call.blocks()
        ]
    ).amax(0)  # [b, 1, 1, 1]
    outputs = [
        call.output(call.softmax(quantized(call.logits(rows).to(dtype), largest, bits), rows)) for rows in call.blocks()
    ]
    return torch.cat(outputs, dim=1)


def log_likelihoods(loaded: LoadedModel, items: Sequence[Item], bits: int, batch_tokens: int) -> list[list[float]]:
    """Compute the log-likelihoods of each item's answers, with attention logits quantized to `bits` bits."""
    pairs = {
        (item.id, at): pair
        for item in items
        for at, pair in enumerate(zip(item.contexts, item.continuations, strict=True))
    }
    with watched(loaded.model, partial(quantized_attention, bits=bits)) if bits < 16 else nullcontext():
        scores = dict(continuation_log_probs(loaded, pairs, batch_tokens))
    return [[scores[item.id, at] for at in range(len(item.continuations))] for item in items]


class LogitBits(LogitBitsSettings, Probe[Item]):
    """Zero-shot multiple-choice accuracy with dynamic post-training quantization of the attention logits.

    Logits are the scaled scores before the softmax. Absmax quantization to b bits divides them by their largest
    magnitude, multiplies by 2^(b-1) - 1 and rounds; they are scaled back before the softmax, in float32. The paper does
    not define the largest magnitude. Here it is that of all logits of a layer in one sequence: over all heads (both
    maps of a differential head) and all pairs of a query and a key that it sees.

    As in the LM Evaluation Harness, `acc` takes the answer with the largest sum of log-probabilities, `acc_norm` that
    with the largest sum per character.
    """

    @property
    def dataset(self) -> str:
        """Name of the data in `find`."""
        return dataset_name(self.task)

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Item]:
        """Return randomly drawn questions by their id."""
        return {item.id: item for item in self.drawn(read(self.task, source), self.items, self.task)}

    def tokens_at_once(self, loaded: LoadedModel, samples: Mapping[str, Item]) -> int:
        """Return the tokens of the longest question with its answer."""
        texts = (pair for item in samples.values() for pair in zip(item.contexts, item.continuations, strict=True))
        return len(loaded.prefix) + max(len(loaded.encode("".join(pair))) for pair in texts)

    def measure(self, loaded: LoadedModel, samples: Mapping[str, Item]) -> Iterator[Outcome]:
        """Score the answers of a batch of questions with every number of bits, then the next batch."""
        items, dtype = list(samples.values()), str(loaded.model.dtype).removeprefix("torch.")
        for start in range(0, len(items), ITEMS_AT_ONCE):
            batch = items[start : start + ITEMS_AT_ONCE]
            scores = {bits: log_likelihoods(loaded, batch, bits, self.batch_tokens) for bits in BITS}
            for index, item in enumerate(batch):
                lengths = [len(answer.strip()) for answer in item.continuations]
                measurements = []
                for bits in BITS:
                    sums = np.array(scores[bits][index])
                    answers = {"acc": likeliest(sums, dtype), "acc_norm": likeliest(sums / lengths, dtype)}
                    right = {name: answer == item.gold for name, answer in answers.items()}
                    measurements.append(Measurement({"bits": bits}, right))
                detail = {"gold": item.gold, "log_likelihoods": {str(bits): scores[bits][index] for bits in BITS}}
                yield Outcome(item.id, measurements, detail)

    def draw(self, report: Report, figure: Any) -> None:
        """Draw a line for each model over the bits, and the accuracy of guessing."""
        guessed = [1 / len(outcome.detail["log_likelihoods"]["16"]) for outcome in report.outcomes[0].values()]
        titles = {"acc": "sums of log-probabilities", "acc_norm": "sums divided by characters"}
        for axes, (metric, title) in zip(panels(figure, len(titles)), titles.items(), strict=True):
            lines(axes, range(len(BITS)), report.points(metric))
            axes.axhline(fmean(guessed), color="grey", linestyle="--", label="guessing")
            axes.set_xticks(range(len(BITS)), [str(row["condition"]["bits"]) for row in report.rows])
            axes.set_ylim(0, 1)
            finish(axes, "bits of the attention logits", f"accuracy ({self.task})", title)
