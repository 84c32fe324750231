# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Registers the attention function `diff_attention` with transformers.

It calls the kernels where they support the inputs, and transformers' `sdpa` elsewhere.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from diffllama import kernels
from diffllama.modeling_diff.modeling_diffllama import DIFF_ATTENTION


def diff_attention_forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Call `kernels.attention_forward` with transformers' `sdpa` as the fallback for unsupported inputs."""
    return kernels.attention_forward(*args, sdpa=sdpa_attention_forward, **kwargs)


def diff_attention_mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return the mask of `sdpa`, or on a GPU the equivalent `kernels.key_intervals`, once for all layers.

    Padding between tokens and custom masks may hide keys between visible ones. Such a mask stays a mask.
    """
    mask = sdpa_mask(*args, attention_mask=attention_mask, use_vmap=use_vmap, device=device, **kwargs)
    if mask is None or not kernels.runs_triton(device):
        return mask
    intervals = kernels.key_intervals(mask, may_have_holes=attention_mask is not None or use_vmap)
    return mask if intervals is None else intervals


AttentionInterface.register(DIFF_ATTENTION, diff_attention_forward)
AttentionMaskInterface.register(DIFF_ATTENTION, diff_attention_mask)
