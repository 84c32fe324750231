# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Observe or replace a model's attention, layer by layer, in the one call of transformers' attention interface.

The maps of all queries are never computed at once: an observer computes blocks of rows.

Letters in shapes: b batch, n queries, m keys, H query heads, one for each softmax map, of which in a differential model
s are signals (else all), D width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffllama.modeling_diff.differential_attention import at_least_float32, differential_maps


IMPLEMENTATION = "diffllama_evaluation"
"""The name under which transformers finds `attend`."""

BLOCK_BYTES = 64 * 2**20
"""Approximate memory of a block of rows, for all heads of a layer."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One layer's call.

    Args:
        module: the attention module that calls.
        query: [b, H, n, D]. key, value: [b, key/value heads, m, D].
        mask: [b or 1, 1, n, m], true where a query sees a key, or `None`: query i sees the keys to m - n + i.
        scaling: of the scores.
        differential_lambda: λ, [1] or [b, n, s, 1]; `None` in a model that is not differential.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    mask: torch.Tensor | None = None
    differential_lambda: torch.Tensor | None = None

    @property
    def layer(self) -> int:
        """The layer's number, from 0."""
        return cast(int, self.module.layer_idx)

    def blocks(self) -> Iterator[slice]:
        """Slices of rows whose scores take about `BLOCK_BYTES` in float32."""
        batch, heads, n, _ = self.query.shape
        rows = max(1, BLOCK_BYTES // (4 * batch * heads * self.key.shape[2]))
        return (slice(start, min(n, start + rows)) for start in range(0, n, rows))

    def visible(self, rows: slice) -> torch.Tensor:
        """Whether a query attends to a key, [b or 1, 1, rows, m]."""
        if self.mask is not None:
            return self.mask[:, :, rows, : self.key.shape[2]]
        n, m = self.query.shape[2], self.key.shape[2]
        queries = torch.arange(m - n, m, device=self.query.device)[rows]
        return (torch.arange(m, device=self.query.device) <= queries[:, None])[None, None]

    def logits(self, rows: slice) -> torch.Tensor:
        """Scaled scores before the softmax, [b, H, rows, m], including masked keys.

        In float32 (float64 in a float64 model), as fused kernels compute them, never rounded to half precision.
        """
        dtype = at_least_float32(self.query.dtype)
        groups = self.query[:, :, rows].to(dtype).unflatten(1, (self.key.shape[1], -1))
        logits = groups.flatten(2, 3) @ self.key.to(dtype).transpose(-1, -2)  # [b, key heads, group · rows, m]
        return (logits * self.scaling).unflatten(2, groups.shape[2:4]).flatten(1, 2)

    def softmax_maps(self, rows: slice) -> torch.Tensor:
        """The softmax maps, [b, H, rows, m], in float32 (float64 in a float64 model)."""
        return self.softmax(self.logits(rows), rows)

    def softmax(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Masked softmax of scores [b, H, rows, m] -> the same shape and dtype."""
        logits = logits.masked_fill(~self.visible(rows), float("-inf"))
        return logits.softmax(-1).nan_to_num()  # a padded query sees nothing

    def maps(self, rows: slice) -> torch.Tensor:
        """The maps that multiply the values: A1 - λ·A2, signed, or the plain softmax maps. [b, s, rows, m]."""
        maps = self.softmax_maps(rows)
        if self.differential_lambda is None:
            return maps
        weight, r = self.differential_lambda, cast(int, self.module.signals_per_noise)
        return differential_maps(maps, weight if weight.dim() == 1 else weight[:, rows], r)

    def output(self, maps: torch.Tensor) -> torch.Tensor:
        """Softmax maps [b, H, rows, m] times the values: [b, rows, H, D]."""
        groups = maps.to(self.value.dtype).unflatten(1, (self.value.shape[1], -1))
        output = groups.flatten(2, 3) @ self.value  # [b, value heads, group · rows, D]
        return output.unflatten(2, groups.shape[2:4]).flatten(1, 2).transpose(1, 2)


Attention = Callable[[AttentionCall], torch.Tensor | None]
"""Observes a call. If it returns a tensor [b, n, H, D], that replaces the call's output."""

_attention: ContextVar[Attention] = ContextVar("attention")


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    differential_lambda: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: `sdpa`, observed or replaced by the function given to `watched`."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} changes its scores by `{name}`, which no probe measures.")
    call = AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        differential_lambda=differential_lambda,
    )
    output = _attention.get()(call)
    if output is None:
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    return output, None


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@contextmanager
def watched(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """Pass every attention call of `model` through `attention`.

    Raises:
        ValueError: the model's attention is not one call a layer of transformers' attention interface, or it changes
            its scores in a way that `AttentionCall` does not know.
    """
    kind = model.config.model_type
    if kind == "diffllama":  # two calls a layer, in the newest versions, that are not told λ
        raise ValueError(
            "The attention of transformers' own `diffllama` cannot be measured. "
            "Convert the model: diffllama convert SRC DEST --from transformers"
        )
    if not model._supports_attention_backend:
        raise ValueError(f"The attention of `{kind}` does not go through transformers' attention interface.")
    implementation = model.config._attn_implementation
    token = _attention.set(attention)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        model.set_attn_implementation(implementation)
        _attention.reset(token)
