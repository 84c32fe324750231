# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Differential attention as one ordinary attention call.

A differential head of the paper (arXiv 2410.05258, equation 1),

    O = (softmax(Q1 K1ᵀ/√d) - λ softmax(Q2 K2ᵀ/√d)) V,

is a grouped-query attention group: joined keys K = [K1 | K2] of the values' width D = 2d, and the two queries padded
with zeros, [Q1 | 0] and [0 | Q2], so that [Q1 | 0]·K = Q1·K1 and [0 | Q2]·K = Q2·K2. Any engine computes both maps'
outputs in one call that reads keys and values once; `combine_maps` then subtracts them.

Letters in shapes: b batch, n tokens, m keys, h differential heads, d width of one map's query and key, D width of
values. The two maps of a head are neighbours in every tensor.
"""

import math

import torch
from torch import nn


def exponential_lambda_init(layer_idx: int) -> float:
    """λ_init of layer `layer_idx`, 0 for the first: 0.8 - 0.6·exp(-0.3·l) (paper, section 2.1, where l starts at 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which λ, norms and softmax are computed: float32, or float64 in a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def pad_queries(query: torch.Tensor) -> torch.Tensor:
    """[b, n, 2h, d] -> [b, n, 2h, 2d]: zeros after each first query of a pair and before each second one."""
    pairs = query.unflatten(-2, (-1, 2))  # [b, n, h, 2, d]
    quarters = pairs.new_zeros(*pairs.shape[:-2], 4, pairs.shape[-1])  # q1, 0, 0, q2
    quarters[..., ::3, :] = pairs
    return quarters.view(*query.shape[:-1], -1)


def join_keys(key: torch.Tensor) -> torch.Tensor:
    """[b, n, 2h, d] -> [b, n, h, 2d]: the two keys of each pair side by side."""
    return key.unflatten(-2, (-1, 2)).flatten(-2)


def vector_lambda(
    q1: torch.Tensor, k1: torch.Tensor, q2: torch.Tensor, k2: torch.Tensor, lambda_init: float
) -> torch.Tensor:
    """λ = exp(q1·k1) - exp(q2·k2) + λ_init (paper, equation 2) of four [d] vectors, as a [1] tensor in float32."""
    dtype = at_least_float32(q1.dtype)
    first = torch.sum(q1.to(dtype) * k1.to(dtype), dim=-1, keepdim=True).exp()
    second = torch.sum(q2.to(dtype) * k2.to(dtype), dim=-1, keepdim=True).exp()
    return first - second + lambda_init


def combine_maps(output: torch.Tensor, differential_lambda: torch.Tensor) -> torch.Tensor:
    """o1 - λ·o2 of each pair: [b, n, 2h, D], λ [1] or [b, n, h, 1] -> [b, n, h, D] in `output`'s dtype.

    λ has a dimension of its own, so that it promotes half-precision outputs and the difference is float32.
    """
    first, second = output.unflatten(-2, (-1, 2)).unbind(-2)
    return (first - differential_lambda * second).to(output.dtype)


def differential_maps(maps: torch.Tensor, differential_lambda: torch.Tensor) -> torch.Tensor:
    """A1 - λ·A2 of each pair: softmax maps [b, 2h, n, m], λ [1] or [b, n, h, 1] -> [b, h, n, m], signed."""
    return combine_maps(maps.transpose(1, 2), differential_lambda).transpose(1, 2)


class DiffLlamaRMSNorm(nn.Module):
    """RMSNorm over the last dimension in float32 (or float64), with a weight [hidden_size] if elementwise affine."""

    def __init__(self, hidden_size: int, eps: float, elementwise_affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and, with a weight of that dtype, the same dtype."""
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(at_least_float32(dtype))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)
        return hidden_states if self.weight is None else self.weight * hidden_states

    def extra_repr(self) -> str:
        """Shape of the weight and ε, for `print(model)`."""
        return f"{None if self.weight is None else tuple(self.weight.shape)}, eps={self.variance_epsilon}"
