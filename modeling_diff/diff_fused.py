# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The attention implementation `diff_fused`: both maps are subtracted inside it.

Other implementations compute what they know, each map's output, and the model subtracts these. This one is registered
with transformers like any other, takes the same call and gives their difference, for about half of the work. Where it
cannot be used, it is transformers' `sdpa`.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .blocked_attention import blocked_attention


NAME = "diff_fused"  # transformers takes every name with `flash` in it for the package of that name


def is_blocked(
    query: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float, options: dict[str, Any]
) -> bool:
    """Whether `blocked_attention` can compute a call: on a CPU, in float32 or float64, and no more asked for.

    Args:
        query: [b, 2h, n, D].
        attention_mask: as `sdpa` takes it.
        dropout: of the maps.
        options: what else the call has.
    """
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and query.numel() > 0
        and dropout == 0
        and (attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1))
        and all(options.get(name) is None for name in ("cache", "is_causal", "position_bias"))
        and not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or torch.jit.is_tracing())
    )


def diff_fused_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    differential_lambda: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Differential attention, or the two maps' outputs.

    Args:
        module: `DiffLlamaAttention`.
        query: [b, 2h, n, D]. key, value: [b, key/value heads, m, D].
        attention_mask: as `sdpa` takes it: `None` where one query sees every key, or each those up to its own.
        scaling: of the scores.
        dropout: of the maps.
        differential_lambda: λ, [1] or [b, n, h, 1].
        kwargs: the implementation's options.

    Returns:
        [b, n, h, D], or from `sdpa` [b, n, 2h, D]; and `None`, for there are no maps to show.
    """
    if not is_blocked(query, attention_mask, dropout, kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    n = query.shape[2]
    if attention_mask is None and 1 < n < key.shape[2]:  # the room of a static cache behind the prompt
        key, value = key[:, :, :n], value[:, :, :n]
    return blocked_attention(query, key, value, differential_lambda, attention_mask, module.map_dim, scaling), None


def chosen(
    implementation: str,
    variant: str,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> str:
    """What computes a call: `diff_fused` instead of `sdpa`, where it wins.

    It does so for V1, of which `sdpa` multiplies the zeros of the padded queries. In V2 it must be asked for by its
    name: a converted Llama's logits are bit for bit the Llama's only if both are computed by `sdpa`.

    Args:
        implementation: the configured one.
        variant: v1 or v2.
        query, attention_mask, dropout, options: as in `is_blocked`.
    """
    replaces = implementation == "sdpa" and variant == "v1"
    return NAME if replaces and is_blocked(query, attention_mask, dropout, options) else implementation


AttentionInterface.register(NAME, diff_fused_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
