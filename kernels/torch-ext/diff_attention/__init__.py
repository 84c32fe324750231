# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Differential attention, (softmax(Q1 K1ᵀ/√d) - λ softmax(Q2 K2ᵀ/√d)) V, in one kernel.

Any attention function can compute a differential head as two ordinary heads, whose outputs are then subtracted. These
kernels subtract the two softmax maps before multiplying by V, which takes about half of the FLOPs: on CPUs in blocks in
plain PyTorch (float32 and float64), on GPUs in Triton (float32, bfloat16 and float16). Other calls fall back to
PyTorch's SDPA.

In grouped differential attention (arXiv 2510.06949), r signal heads share one noise head, whose map is computed once.
Queries are ordered in groups: r signals, then their noise. The paper's differential head has r = 1.

The package needs only torch, and triton on GPUs. `diff_attention` takes tensors. `flash_attn_forward` is an attention
function of transformers, with the name that transformers expects in a kernel of the Hub.

Letters in shapes: b batch, n tokens, m keys, s signal heads, H query heads (signals and noise), D width of values.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .cpu import blocked_attention, combine_outputs, varlen_attention
from .triton import DTYPES, HAS_TRITON, triton_attention


__all__ = ["attention_forward", "diff_attention", "flash_attn_forward", "key_intervals", "supports_flash_attn"]

supports_flash_attn = True
"""Flag that transformers requires in a kernel of the Hub together with `flash_attn_forward`."""


def supports_options(query: torch.Tensor, dropout: float, options: dict[str, Any]) -> bool:
    """Whether the kernels support a call's options. Arguments as in `attention_forward`."""
    return (
        query.numel() > 0
        and dropout == 0
        and options.get("is_causal") is not False
        and options.get("position_bias") is None
        and not torch.jit.is_tracing()
    )


def supports_cpu(query: torch.Tensor) -> bool:
    """Whether a call is on a CPU, in float32 or float64, without autocast and not compiled."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
    )


def supports_blocked(
    query: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float, options: dict[str, Any]
) -> bool:
    """Whether `blocked_attention` supports a call: on a CPU, with no mask or a boolean one that all heads share."""
    b, _, n, _ = query.shape
    return (
        supports_cpu(query)
        and supports_options(query, dropout, options)
        and (
            attention_mask is None
            or (attention_mask.dtype == torch.bool and attention_mask.shape[:3] in ((b, 1, n), (1, 1, n)))
        )
    )


def supports_varlen(query: torch.Tensor, dropout: float, options: dict[str, Any]) -> bool:
    """Whether `varlen_attention` supports a call of continuous batching: on a CPU, several requests, no window."""
    return (
        supports_cpu(query)
        and dropout == 0
        and options.get("sliding_window") is None
        and len(options["cu_seq_lens_q"]) > 2
    )


def runs_triton(device: torch.device | str) -> bool:
    """Whether a device can run the Triton kernels."""
    return HAS_TRITON and torch.device(device).type == "cuda"


def supports_triton(query: torch.Tensor, dropout: float, options: dict[str, Any]) -> bool:
    """Whether `triton_attention` supports a call, provided that every query sees an interval of keys."""
    return (
        runs_triton(query.device)
        and query.dtype in DTYPES
        and supports_options(query, dropout, options)
        and query.shape[-1] in range(32, 257, 2)
    )


def key_intervals(mask: torch.Tensor, may_have_holes: bool = True) -> torch.Tensor | None:
    """Return the half-open interval of keys that each query sees: boolean [b, 1, n, m] -> [b, 1, n, 2] in int32.

    Causal masks, sliding windows and packed sequences give intervals. Padding between tokens gives holes.

    Args:
        mask: true where a query sees a key.
        may_have_holes: whether to check for holes. The check synchronizes a GPU and is not possible in compiled code.

    Returns:
        The intervals, or `None` if a query sees keys on both sides of one that it does not see (compiled: may see).
    """
    visible = mask.any(-1)
    start, hidden_after = mask.byte().argmax(-1), mask.flip(-1).byte().argmax(-1)
    intervals = torch.stack((start * visible, (mask.shape[-1] - hidden_after) * visible), dim=-1).int()
    lengths = intervals[..., 1] - intervals[..., 0]
    if may_have_holes and (torch.compiler.is_compiling() or not torch.equal(mask.sum(-1), lengths)):
        return None
    return intervals


def sdpa_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the outputs of all maps, [b, n, H, D], by PyTorch's SDPA. Arguments as in `attention_forward`."""
    n = query.shape[2]
    causal = attention_mask is None and n > 1 and is_causal is not False
    if causal:  # a static cache has free slots after the prompt
        key, value = key[:, :, :n], value[:, :, :n]
    outputs = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return outputs.transpose(1, 2), None


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    differential_lambda: torch.Tensor,
    sdpa: Callable[..., tuple[torch.Tensor, None]] = sdpa_forward,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute differential attention, with the signature of a transformers attention function.

    Args:
        module: the attention layer, with `map_dim`, `signals_per_noise` and, for continuous batching, `layer_idx`.
        query: [b, H, n, D], ordered in groups: signals, then their noise.
        key: [b, key/value heads, m, D].
        value: [b, key/value heads, m, D].
        attention_mask: boolean [b or 1, 1, n, m], true where a query sees a key; or added to the scores; or the
            intervals of `key_intervals`, the only mask for the Triton kernels. `None`: a single query sees all keys,
            several queries are causal.
        scaling: factor of the scores.
        dropout: probability for each softmax map.
        differential_lambda: λ, [1] or [b, n, s, 1].
        sdpa: fallback for unsupported calls: dropout, half precision on a CPU, masks with holes on a GPU, ….
        kwargs: options of attention functions. With `cache`, the call is from continuous batching.

    Returns:
        The differences [b, n, s, D], or all maps' outputs [b, n, H, D] from `sdpa`; and `None` in place of the maps.
    """
    n = query.shape[2]
    options: tuple[Any, ...] = module.map_dim, scaling, module.signals_per_noise
    cache = kwargs.pop("cache", None)
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx, kwargs)  # sets this layer's cu_seq_lens_k
        if supports_varlen(query, dropout, kwargs):
            cu_seqlens = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
            return varlen_attention(query, key, value, differential_lambda, *cu_seqlens, *options), None
    elif supports_blocked(query, attention_mask, dropout, kwargs):
        if attention_mask is None and n > 1:  # a static cache has free slots after the prompt
            key, value = key[:, :, :n], value[:, :, :n]
        return blocked_attention(query, key, value, differential_lambda, attention_mask, *options), None
    elif supports_triton(query, dropout, kwargs) and (attention_mask is None or attention_mask.dtype == torch.int32):
        if attention_mask is None and n > 1:
            key, value = key[:, :, :n], value[:, :, :n]
        return triton_attention(query, key, value, differential_lambda, attention_mask, *options), None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        keys = torch.arange(key.shape[2], device=key.device)
        attention_mask = (keys >= attention_mask[..., :1]) & (keys < attention_mask[..., 1:])
    return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def flash_attn_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call `attention_forward` for transformers' kernel loader, which passes the masks of `sdpa`.

    Every layer computes their intervals for the Triton kernels.
    """
    if (
        attention_mask is not None
        and attention_mask.dtype == torch.bool
        and attention_mask.shape[1] == 1
        and kwargs.get("cache") is None
        and supports_triton(query, dropout, kwargs)
    ):
        intervals = key_intervals(attention_mask)
        attention_mask = attention_mask if intervals is None else intervals.expand(query.shape[0], -1, -1, -1)
    return attention_forward(module, query, key, value, attention_mask, scaling, dropout, **kwargs)


def diff_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    map_dim: int,
    scaling: float | None = None,
    signals_per_noise: int = 1,
) -> torch.Tensor:
    """Compute differential attention (arXiv 2410.05258, equation 1; arXiv 2510.06949). Differentiable.

    Args:
        query: [b, H, n, D], in groups of signals, then their noise; in V1 padded, [signal | 0] and [0 | noise].
        key: [b, key/value heads, m, D], in V1 [K1 | K2]. value: [b, key/value heads, m, D].
        differential_lambda: λ, [1] or [b, n, s, 1], float32 (float64 with float64 tensors).
        attention_mask: boolean [b or 1, 1, n, m], true where a query sees a key. `None`: causal.
        map_dim: width of one map's query and key: D/2 in V1, D in V2.
        scaling: factor of the scores, by default map_dim^-1/2.
        signals_per_noise: r, the signals of a group.

    Returns:
        [b, n, s, D] in the queries' dtype.
    """
    out, _ = flash_attn_forward(
        SimpleNamespace(map_dim=map_dim, signals_per_noise=signals_per_noise),
        query,
        key,
        value,
        attention_mask,
        map_dim**-0.5 if scaling is None else scaling,
        differential_lambda=differential_lambda,
    )
    if out.shape[2] == query.shape[1]:  # of SDPA
        out = combine_outputs(out, differential_lambda, signals_per_noise).to(query.dtype)
    return out
