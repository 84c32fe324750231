# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention to the answer in a long text, and to the rest of the text, the noise."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.patches import Rectangle
from transformers import PreTrainedModel

from diffllama.evaluation.attention import AttentionCall, watched
from diffllama.evaluation.datasets.data import Source, texts
from diffllama.evaluation.datasets.haystack import Haystack
from diffllama.evaluation.figures import finish, lines, panels
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.runs import Measurement, Outcome, Probe, Report
from diffllama.evaluation.settings import AttentionToAnswerSettings


BINS = 32
"""Number of equal pieces of the context in the heat map."""

LEAST_SUM = 1e-3
"""Rows whose sum, averaged over layers and heads, is smaller are not divided by it."""


@dataclass(frozen=True)
class Passage:
    """A prompt as token ids, with the spans [start, end) of its parts.

    Args:
        ids: the prompt's token ids.
        context: the span of the text with the needle.
        answer: the span of the needle.
        depth: of the needle, from 0, the beginning of the text, to 1, its end.
    """

    ids: list[int]
    context: tuple[int, int]
    answer: tuple[int, int]
    depth: float

    def parts(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sum weights [..., n] over the answer, the noise and the rest: [...] each."""
        answer, context = (weights[..., slice(*span)].sum(-1) for span in (self.answer, self.context))
        return {"answer": answer, "noise": context - answer, "other": weights.sum(-1) - context}


def passage_of(
    loaded: LoadedModel, text: str, context: tuple[int, int], answer: tuple[int, int], depth: float
) -> Passage:
    """Encode a prompt whose parts are given as spans [start, end) in characters.

    Raises:
        ValueError: the tokenizer is not a fast one, so that the characters of its tokens are unknown.
    """
    if not loaded.tokenizer.is_fast:
        raise ValueError(f"The tokenizer of {loaded.name} must be a fast one, which returns character offsets.")
    encoded = loaded.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

    def tokens(start: int, end: int) -> tuple[int, int]:
        inside = [at for at, (first, last) in enumerate(encoded.offset_mapping) if first < end and last > start]
        return len(loaded.prefix) + inside[0], len(loaded.prefix) + inside[-1] + 1

    return Passage(loaded.prefix + encoded.input_ids, tokens(*context), tokens(*answer), depth)


def last_rows(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the last token's attention to all tokens, averaged over the heads of each layer.

    Args:
        model: a causal language model.
        ids: token ids [1, n].

    Returns:
        The mean of the maps' rows (signed in a differential model) and of their absolute values, both [layers, n] in
        float64 on the CPU.
    """
    rows_by_layer: dict[int, torch.Tensor] = {}

    def look(call: AttentionCall) -> None:
        n = call.query.shape[2]
        rows = call.maps(slice(n - 1, n))[0, :, 0].cpu().double()  # [s, n]
        rows_by_layer[call.layer] = torch.stack((rows.mean(0), rows.abs().mean(0)))

    with torch.inference_mode(), watched(model, look):
        model(ids, use_cache=False, logits_to_keep=1)
    signed, absolute = torch.stack([rows_by_layer[layer] for layer in sorted(rows_by_layer)], dim=1)
    return signed, absolute


class AttentionToAnswer(AttentionToAnswerSettings, Probe[Passage]):
    """Attention of the prompt's last token, which predicts the answer's first token, to the answer and to noise.

    A text contains a sentence with a city's magic number, the needle, at some depth. A question for the number follows
    the text. The tokens of the needle (all tokens with a character of it) are `answer`, the other tokens of the text
    are `noise`. The BOS token, the sentence before the text, the question and the beginning of its answer are `other`.

    Maps are averaged over heads and layers (as the authors write in microsoft/unilm, issue 1654) and then divided by
    their sum, so that the three parts sum to 1. The paper calls its scores normalized and prints no formula. The rows
    of a differential map A1 - λ·A2 sum to 1 - λ and have both signs, so there are two kinds of shares:

    * signed: the parts of the row, divided by its sum. In a plain model these are the attention weights, and an exact
      conversion has the same. The division follows the average, because a head with λ near 1 would otherwise dominate.
      So each head has weight 1 - λ. Positive and negative entries cancel, so a share may be below 0 or above 1. A
      sample whose average sum is within 0.001 of 0 has no signed shares.
    * absolute: the parts of Σ|a|, never below 0. Subtracted attention counts as attention, and nothing cancels.

    `sum` is the divisor. `detail` has each layer's averages over heads, not divided, and for the heat map those of 32
    equal pieces of the text, divided by the layer's Σ|a|.
    """

    dataset: ClassVar[str] = "novels"

    def samples(self, source: Source, loaded: LoadedModel) -> Mapping[str, Passage]:
        """Return prompts with one needle, as token ids."""
        haystack = Haystack(texts(source).values(), loaded, self.length)
        return {
            f"{depth} {number}": self.passage(haystack, depth, number, loaded)
            for depth in self.depth
            for number in range(self.samples_per_condition)
        }

    def passage(self, haystack: Haystack, depth: float, number: int, loaded: LoadedModel) -> Passage:
        """Return prompt number `number` at a depth. Raises as `passage_of`."""
        prompt = haystack.prompt(
            length=self.length,
            depth=depth,
            needles=1,
            queries=1,
            seed=f"{self.seed} {number}",
        )
        return passage_of(loaded, prompt.text, prompt.context, prompt.needles[0], depth)

    def measure(self, loaded: LoadedModel, samples: Mapping[str, Passage]) -> Iterator[Outcome]:
        """Compute the parts of the last row of each layer's maps."""
        for name, passage in samples.items():
            measurements, layers = [], {}
            signed, absolute = last_rows(loaded.model, loaded.tensor(passage.ids))
            for kind, rows in (("signed", signed), ("absolute", absolute)):
                parts = passage.parts(rows)
                layers[kind] = {part: values.tolist() for part, values in parts.items()}
                whole = rows.sum(-1).mean().item()
                if abs(whole) >= LEAST_SUM:
                    shares = {part: values.mean().item() / whole for part, values in parts.items()}
                    measurements.append(Measurement({"depth": passage.depth, "shares": kind}, shares | {"sum": whole}))
            start, end = passage.context
            pieces = signed[:, start:end].tensor_split(min(BINS, end - start), dim=1)
            mass = absolute.sum(1, keepdim=True).clamp(min=1e-9)  # the two maps may cancel
            shown = torch.stack([piece.sum(1) for piece in pieces], dim=1) / mass
            detail = {
                "layers": layers,
                "answer": [(at - start) / (end - start) for at in passage.answer],
                "map": [[round(value, 6) for value in row] for row in shown.tolist()],
            }
            yield Outcome(name, measurements, detail)

    def draw(self, report: Report, figure: Any) -> None:
        """Draw signed shares by depth, and each model's heat map of the first prompt at the depth nearest to 0.5.

        Heat maps show layers from bottom to top and positions in the text from left to right, with the answer framed.
        """
        rows = sorted(report.select(shares="signed"), key=lambda row: row["condition"]["depth"])
        answer, noise, *maps = panels(figure, 2 + len(report.names), rows=2)
        for axes, part in ((answer, "answer"), (noise, "noise")):
            lines(axes, [100 * row["condition"]["depth"] for row in rows], report.points(part, rows))
            axes.axhline(0, color="black", linewidth=0.8)
            finish(axes, "depth of the answer (% of the text)", f"signed share of attention: {part}")
        depth = min(self.depth, key=lambda depth: abs(depth - 0.5))
        details = [outcomes[f"{depth} 0"].detail for outcomes in report.outcomes]
        top = max(np.abs(np.array(detail["map"], float)).max() for detail in details)
        for axes, name, detail in zip(maps, report.names, details, strict=True):
            values = np.array(detail["map"], float)
            layers, bins = values.shape
            numbers = [str(layer) if layer % 5 == 0 else "" for layer in range(layers)]
            picture = axes.imshow(values, cmap="PuOr", vmin=-top, vmax=top, aspect="auto", origin="lower")
            axes.set_yticks(range(layers), numbers)
            first, last = np.floor(detail["answer"][0] * bins), np.ceil(detail["answer"][1] * bins)
            frame = Rectangle((first - 0.5, -0.5), last - first, layers, fill=False, edgecolor="#009E73", linewidth=2)
            axes.add_patch(frame)
            axes.set_xticks(np.linspace(-0.5, bins - 0.5, 5), [f"{at} %" for at in range(0, 101, 25)])
            figure.colorbar(picture, ax=axes, label="signed share of the layer's Σ|a|")
            finish(axes, "position in the text, the answer framed", "layer", name)
            axes.grid(visible=False)
