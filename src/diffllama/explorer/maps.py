# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention maps of a text, for every head or of one head.

Letters in shapes: n tokens, s signal heads (all heads of a Transformer).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock
from typing import cast

import torch
from transformers import PreTrainedModel

from diffllama.evaluation.attention import AttentionCall, watched
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.attention import Passage, last_rows
from diffllama.training.stats import overlap, signals_and_noise


LIMIT = 512
"""Most tokens of a text."""


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second model with the same weights in memory, whose attention can be observed while the first runs."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def weighted_maps(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute a layer's first maps and second maps times λ, [s, n, n] each, and λ [s, n]; `None` in a Transformer."""
    n = call.query.shape[2]
    maps = call.softmax_maps(slice(0, n))
    if call.differential_lambda is None:
        return maps[0], None, None
    first, second = signals_and_noise(maps, cast(int, call.module.signals_per_noise))
    weight = call.differential_lambda  # V1 [1], V2 [1, n, s, 1]
    weight = weight.expand(1, first.shape[1], n) if weight.dim() == 1 else weight[..., 0].transpose(1, 2)
    weight = weight.to(first.dtype)
    return first[0], (weight[..., None] * second)[0], weight[0]


@dataclass(frozen=True)
class HeadMaps:
    """The maps of one head.

    Args:
        first: softmax map A1, [n, n].
        second: λ·A2, [n, n]; `None` in a Transformer.
        weight: λ of each token, [n]; `None` in a Transformer.
    """

    first: torch.Tensor
    second: torch.Tensor | None
    weight: torch.Tensor | None


class MapReader:
    """Reads the attention maps of a model, one caller at a time. The model may generate text meanwhile.

    Args:
        loaded: the model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = replace(loaded, model=share_weights(loaded.model))
        self.lock = Lock()

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.loaded.name

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, as the model reads it.

        Raises:
            ValueError: the text is empty, or has more than `LIMIT` tokens.
        """
        ids = self.loaded.prefix + self.loaded.encode(text)
        if not text.strip():
            raise ValueError("The text is empty. Write one.")
        self.check_length(len(ids))
        return ids

    def check_length(self, length: int) -> None:
        """Check the number of tokens. Raises ValueError if there are more than `LIMIT`."""
        if length > LIMIT:
            raise ValueError(f"The text has {length:,} tokens for {self.name}. The limit is {LIMIT}: shorten it.")

    def tokens(self, ids: list[int]) -> list[str]:
        """Return the text of each token."""
        return [self.loaded.tokenizer.decode([token]) for token in ids]

    def cancelled(self, ids: list[int]) -> list[list[float]]:
        """Compute for each layer and head which share of the first map λ·A2 cancels: Σ min(A1, λ·A2), mean over rows.

        It is 0 for a Transformer, which has one map.
        """
        by_layer: dict[int, list[float]] = {}

        def look(call: AttentionCall) -> None:
            first, second, _ = weighted_maps(call)
            shares = torch.zeros(first.shape[0]) if second is None else overlap(first, second).mean(-1)
            by_layer[call.layer] = shares.tolist()

        self.observe(ids, look)
        return [by_layer[layer] for layer in sorted(by_layer)]

    def head(self, ids: list[int], layer: int, head: int) -> HeadMaps:
        """Compute the maps of a head.

        Raises:
            ValueError: the model has no such layer or head.
        """
        found: list[HeadMaps] = []

        def look(call: AttentionCall) -> None:
            if call.layer == layer:
                first, second, weight = weighted_maps(call)
                if 0 <= head < len(first):
                    parts = (None if part is None else part[head].cpu() for part in (second, weight))
                    found.append(HeadMaps(first[head].cpu(), *parts))

        self.observe(ids, look)
        if not found:
            raise ValueError(f"{self.name} has no layer {layer} with a head {head}.")
        return found[0]

    def observe(self, ids: list[int], look: Callable[[AttentionCall], None]) -> None:
        """Pass the attention calls of a forward pass through `look`."""
        with self.lock, torch.inference_mode(), watched(self.loaded.model, look):
            self.loaded.model(self.loaded.tensor(ids), use_cache=False, logits_to_keep=1)

    def shares(self, passage: Passage) -> dict[str, list[list[float]]]:
        """Compute what the last token gives to the answer, the noise and the rest, in each layer.

        Returns:
            `signed` and `absolute`: for each the three parts, by layer, as in `diffllama probe attention`, divided by
            the layer's sum of absolute values.
        """
        self.check_length(len(passage.ids))
        with self.lock:
            signed, absolute = last_rows(self.loaded.model, self.loaded.tensor(passage.ids))
        whole = absolute.sum(-1).clamp(min=1e-9)
        return {
            kind: [(part / whole).tolist() for part in passage.parts(rows).values()]
            for kind, rows in (("signed", signed), ("absolute", absolute))
        }
