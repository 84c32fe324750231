# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Registers the attention function `diff_attention` with transformers: the kernels, and `sdpa` for all else."""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from diffllama import kernels
from diffllama.modeling_diff.modeling_diffllama import DIFF_ATTENTION


def diff_attention_forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """`kernels.attention_forward`, which leaves what it does not compute to transformers' `sdpa`."""
    return kernels.attention_forward(*args, sdpa=sdpa_attention_forward, **kwargs)


def diff_attention_mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of `sdpa`; on a GPU its `kernels.key_intervals`, once for all layers, unless it may have holes.

    Padding between tokens and masks of the caller's own may leave holes.
    """
    mask = sdpa_mask(*args, attention_mask=attention_mask, use_vmap=use_vmap, device=device, **kwargs)
    if mask is None or not kernels.runs_triton(device):
        return mask
    intervals = kernels.key_intervals(mask, may_have_holes=attention_mask is not None or use_vmap)
    return mask if intervals is None else intervals


AttentionInterface.register(DIFF_ATTENTION, diff_attention_forward)
AttentionMaskInterface.register(DIFF_ATTENTION, diff_attention_mask)
