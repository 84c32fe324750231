# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The attention implementation `diff_fused`: both maps are subtracted inside it.

Other implementations compute what they know, each map's output, and the model subtracts these. This one is registered
with transformers like any other, takes the same call and gives their difference, for about half of the work: on CPUs by
blocks in plain PyTorch, on GPUs by kernels in Triton. Where neither can be used, it is transformers' `sdpa`.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from .blocked_attention import blocked_attention, packed_attention
from .differential_flash import DTYPES, HAS_TRITON, differential_flash


NAME = "diff_fused"  # transformers takes every name with `flash` in it for the package of that name


def is_ordinary(query: torch.Tensor, dropout: float, options: dict[str, Any]) -> bool:
    """Whether a call asks for nothing that only `sdpa` computes. Arguments as in `is_blocked`."""
    return (
        query.numel() > 0
        and dropout == 0
        and options.get("is_causal") is not False
        and all(options.get(name) is None for name in ("cache", "position_bias"))
        and not torch.jit.is_tracing()
    )


def on_cpu(query: torch.Tensor) -> bool:
    """Whether plain PyTorch computes a call as it is written: on a CPU, in float32 or float64."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
    )


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
    b, _, n, _ = query.shape
    return (
        on_cpu(query)
        and is_ordinary(query, dropout, options)
        and (
            attention_mask is None
            or (attention_mask.dtype == torch.bool and attention_mask.shape[:3] in ((b, 1, n), (1, 1, n)))
        )
    )


def is_packed(query: torch.Tensor, dropout: float, options: dict[str, Any]) -> bool:
    """Whether `packed_attention` computes a call: of continuous batching on a CPU, of several requests, in float32 or
    float64, without a window. Arguments as in `is_blocked`.

    Under the name `sdpa` a call has a cache of pages since transformers 5.19, whose `update` takes the call's options.
    Before, such calls are of `paged|sdpa`.
    """
    return (
        options.get("cache") is not None
        and on_cpu(query)
        and dropout == 0
        and options.get("sliding_window") is None
        and len(options["cu_seq_lens_q"]) > 2
    )


def on_gpu(device: torch.device | str) -> bool:
    """Whether a device runs kernels in Triton."""
    return HAS_TRITON and torch.device(device).type == "cuda"


def is_flash(query: torch.Tensor, bounds: torch.Tensor | None, dropout: float, options: dict[str, Any]) -> bool:
    """Whether `differential_flash` can compute a call; as in `is_blocked`, but for `bounds`, which are not a mask."""
    return (
        on_gpu(query.device)
        and query.dtype in DTYPES
        and is_ordinary(query, dropout, options)
        and query.shape[-1] in range(32, 257, 2)
        and (bounds is None or is_bounds(bounds))
    )


def is_bounds(mask: torch.Tensor) -> bool:
    """Whether what came as a mask is what `diff_fused_mask` makes for GPUs."""
    return mask.dtype == torch.int32


def diff_fused_mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of `sdpa`, or for a GPU, where each query sees an interval of keys, its beginning and its end:
    [b, 1, n, 2] in int32, which no layer has to search for again.

    Causal masks, windows and packed sequences are intervals. Padding between tokens and masks of the caller's own may
    leave holes: then, and where compiled code cannot look, `sdpa` computes with the whole mask.
    """
    mask = sdpa_mask(*args, attention_mask=attention_mask, use_vmap=use_vmap, device=device, **kwargs)
    if mask is None or not on_gpu(device):
        return mask
    seen = mask.any(-1)
    start, left = mask.byte().argmax(-1), mask.flip(-1).byte().argmax(-1)
    bounds = torch.stack((start * seen, (mask.shape[-1] - left) * seen), dim=-1).int()
    if attention_mask is None and not use_vmap:
        return bounds
    holes = torch.compiler.is_compiling() or not torch.equal(mask.sum(-1), bounds[..., 1] - bounds[..., 0])
    return mask if holes else bounds


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
        attention_mask: what `diff_fused_mask` makes, or a mask that `sdpa` takes. `None`: one query sees every key, and
            each of several those up to its own.
        scaling: of the scores.
        dropout: of the maps.
        differential_lambda: λ, [1] or [b, n, h, 1].
        kwargs: the implementation's options.

    Returns:
        [b, n, h, D], or from `sdpa` [b, n, 2h, D]; and `None`, for there are no maps to show.
    """
    if is_packed(query, dropout, kwargs):
        key, value = kwargs["cache"].update(key, value, module.layer_idx, kwargs)  # and names this layer's lengths
        ends = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        return packed_attention(query, key, value, differential_lambda, *ends, module.map_dim, scaling), None
    blocked = is_blocked(query, attention_mask, dropout, kwargs)
    if not (blocked or is_flash(query, attention_mask, dropout, kwargs)):
        if attention_mask is not None and is_bounds(attention_mask):
            keys = torch.arange(key.shape[2], device=key.device)
            attention_mask = (keys >= attention_mask[..., :1]) & (keys < attention_mask[..., 1:])
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    n = query.shape[2]
    if attention_mask is None and 1 < n < key.shape[2]:  # the room of a static cache behind the prompt
        key, value = key[:, :, :n], value[:, :, :n]
    compute = blocked_attention if blocked else differential_flash
    return compute(query, key, value, differential_lambda, attention_mask, module.map_dim, scaling), None


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
    name: a converted Llama's logits are bit for bit the Llama's only if both are computed by `sdpa`. In continuous
    batching it does so for several requests of either: there `sdpa` multiplies every request's queries with every
    other's keys.

    Args:
        implementation: the configured one.
        variant: v1 or v2.
        query, attention_mask, dropout, options: as in `is_blocked`.
    """
    if implementation != "sdpa":
        return implementation
    wins = variant == "v1" and is_blocked(query, attention_mask, dropout, options)
    return NAME if wins or is_packed(query, dropout, options) else implementation


AttentionInterface.register(NAME, diff_fused_attention_forward)
AttentionMaskInterface.register(NAME, diff_fused_mask)
