# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Observe or replace a model's attention in each layer, through transformers' attention interface.

Observers compute the attention maps in blocks of rows, never the maps of all queries at once.

Letters in shapes: b batch, n queries, m keys, H query heads (one per softmax map), s signal heads (all heads in a model
that is not differential), D head width.
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
"""The name under which `attend` is registered in transformers."""

BLOCK_BYTES = 64 * 2**20
"""Approximate memory of a block of rows in bytes, for all heads of a layer."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The inputs of one layer's attention.

    Args:
        module: the layer's attention module.
        query: [b, H, n, D].
        key: [b, key/value heads, m, D].
        value: [b, key/value heads, m, D].
        mask: [b or 1, 1, n, m], true where a query sees a key. `None`: query i sees the keys up to m - n + i.
        scaling: factor of the scores.
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
        """Return slices of rows whose scores take about `BLOCK_BYTES` in float32."""
        batch, heads, n, _ = self.query.shape
        rows = max(1, BLOCK_BYTES // (4 * batch * heads * self.key.shape[2]))
        return (slice(start, min(n, start + rows)) for start in range(0, n, rows))

    def visible(self, rows: slice) -> torch.Tensor:
        """Return whether a query sees a key, [b or 1, 1, rows, m]."""
        if self.mask is not None:
            return self.mask[:, :, rows, : self.key.shape[2]]
        n, m = self.query.shape[2], self.key.shape[2]
        queries = torch.arange(m - n, m, device=self.query.device)[rows]
        return (torch.arange(m, device=self.query.device) <= queries[:, None])[None, None]

    def logits(self, rows: slice) -> torch.Tensor:
        """Compute the scaled scores before the softmax, [b, H, rows, m], including masked keys.

        They are float32 (float64 in a float64 model), as in fused kernels: never rounded to half precision.
        """
        dtype = at_least_float32(self.query.dtype)
        groups = self.query[:, :, rows].to(dtype).unflatten(1, (self.key.shape[1], -1))
        logits = groups.flatten(2, 3) @ self.key.to(dtype).transpose(-1, -2)  # [b, key heads, group · rows, m]
        return (logits * self.scaling).unflatten(2, groups.shape[2:4]).flatten(1, 2)

    def softmax_maps(self, rows: slice) -> torch.Tensor:
        """Compute the softmax maps, [b, H, rows, m], in float32 (float64 in a float64 model)."""
        return self.softmax(self.logits(rows), rows)

    def softmax(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Compute the masked softmax of scores [b, H, rows, m], in the same shape and dtype."""
        logits = logits.masked_fill(~self.visible(rows), float("-inf"))
        return logits.softmax(-1).nan_to_num()  # a padded query sees nothing

    def maps(self, rows: slice) -> torch.Tensor:
        """Compute the maps that multiply the values, [b, s, rows, m]: A1 - λ·A2, signed, or plain softmax maps."""
        maps = self.softmax_maps(rows)
        if self.differential_lambda is None:
            return maps
        weight, r = self.differential_lambda, cast(int, self.module.signals_per_noise)
        return differential_maps(maps, weight if weight.dim() == 1 else weight[:, rows], r)

    def output(self, maps: torch.Tensor) -> torch.Tensor:
        """Multiply softmax maps [b, H, rows, m] by the values: [b, rows, H, D]."""
        groups = maps.to(self.value.dtype).unflatten(1, (self.value.shape[1], -1))
        output = groups.flatten(2, 3) @ self.value  # [b, value heads, group · rows, D]
        return output.unflatten(2, groups.shape[2:4]).flatten(1, 2).transpose(1, 2)


Attention = Callable[[AttentionCall], torch.Tensor | None]
"""Observes a call. A returned tensor [b, n, H, D] replaces the call's output."""

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
    """Compute `sdpa`, observed or replaced by the function given to `watched`. An attention function of transformers.

    Raises:
        ValueError: the model changes its scores by an option that `AttentionCall` does not support.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} changes its scores with `{name}`, which no probe supports.")
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
        ValueError: the model does not call transformers' attention interface once per layer, or it changes its scores
            by an option that `AttentionCall` does not support.
    """
    kind = model.config.model_type
    if kind == "diffllama":  # the newest versions call the interface twice per layer, without λ
        raise ValueError(
            "The attention of transformers' own `diffllama` cannot be measured. Convert the model first: "
            "diffllama convert SRC DEST --from transformers"
        )
    if not model._supports_attention_backend:
        raise ValueError(f"The model type `{kind}` does not use transformers' attention interface, which this needs.")
    implementation = model.config._attn_implementation
    token = _attention.set(attention)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        model.set_attn_implementation(implementation)
        _attention.reset(token)
