# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
# From diffllama 0.1.0, commit e3c0a870fb088a09e51aad82d9588b9bac1c6474.
"""Differential attention as one ordinary attention call.

A differential head of the paper (arXiv 2410.05258, equation 1),

    O = (softmax(Q1 K1ᵀ/√d) - λ softmax(Q2 K2ᵀ/√d)) V,

is computed as a grouped-query attention group: keys are joined to K = [K1 | K2] of the values' width D = 2d, and the
two queries are padded with zeros to [Q1 | 0] and [0 | Q2], so that [Q1 | 0]·K = Q1·K1 and [0 | Q2]·K = Q2·K2. Any
engine computes both maps' outputs in one call that reads keys and values once. `combine_maps` then subtracts them. In
grouped differential attention (arXiv 2510.06949), r signal queries Q1 share one noise query Q2.

Letters in shapes: b batch, n tokens, m keys, H query heads, s of them signal heads, d width of one map's query and key,
D width of values. Query heads are ordered in groups: r signals, then their noise.
"""

import math

import torch
from torch import nn


def exponential_lambda_init(layer_idx: int) -> float:
    """Compute λ_init of layer l = `layer_idx` from 0: 0.8 - 0.6·exp(-0.3·l) (paper, section 2.1, counts from 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which λ, norms and softmax are computed: float32, or float64 in a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def pad_queries(query: torch.Tensor, r: int) -> torch.Tensor:
    """Pad queries with zeros, [b, n, H, d] -> [b, n, H, 2d]: after a group's r signals and before its noise."""
    groups = query.unflatten(-2, (-1, r + 1))
    halves = groups.new_zeros(*groups.shape[:-2], 2 * r + 2, groups.shape[-1])  # s, 0, …, s, 0, 0, noise
    halves[..., : 2 * r : 2, :], halves[..., -1, :] = groups[..., :r, :], groups[..., r, :]
    return halves.view(*query.shape[:-1], -1)


def join_keys(key: torch.Tensor) -> torch.Tensor:
    """Join the signal key and the noise key of each of h key/value heads: [b, n, 2h, d] -> [b, n, h, 2d]."""
    return key.unflatten(-2, (-1, 2)).flatten(-2)


def vector_lambda(
    lambda_init: float, q1: torch.Tensor, k1: torch.Tensor, q2: torch.Tensor, k2: torch.Tensor
) -> torch.Tensor:
    """Compute λ = exp(q1·k1) - exp(q2·k2) + λ_init (paper, equation 2) from four [d] vectors: [1] in float32."""
    dtype = at_least_float32(q1.dtype)
    first = torch.sum(q1.to(dtype) * k1.to(dtype), dim=-1, keepdim=True).exp()
    second = torch.sum(q2.to(dtype) * k2.to(dtype), dim=-1, keepdim=True).exp()
    return first - second + lambda_init


def combine_maps(output: torch.Tensor, differential_lambda: torch.Tensor, r: int) -> torch.Tensor:
    """Subtract λ·noise from each signal: outputs [b, n, H, D] and λ, [1] or [b, n, s, 1] -> [b, n, s, D].

    λ is a tensor with a dimension, so that it promotes half-precision outputs: the difference is computed in float32.
    """
    groups = output.unflatten(-2, (-1, r + 1))
    scale = differential_lambda if differential_lambda.dim() == 1 else differential_lambda.unflatten(-2, (-1, r))
    return (groups[..., :r, :] - scale * groups[..., r:, :]).flatten(-3, -2).to(output.dtype)


def differential_maps(maps: torch.Tensor, differential_lambda: torch.Tensor, r: int) -> torch.Tensor:
    """Apply `combine_maps` to softmax maps: [b, H, n, m] and λ, [1] or [b, n, s, 1] -> signed maps [b, s, n, m]."""
    return combine_maps(maps.transpose(1, 2), differential_lambda, r).transpose(1, 2)


class DiffLlamaRMSNorm(nn.Module):
    """RMSNorm over the last dimension in float32 (or float64), with a weight [hidden_size] if `elementwise_affine`."""

    def __init__(self, hidden_size: int, eps: float, elementwise_affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size]. Keeps the shape, and the dtype if the weight has it."""
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(at_least_float32(dtype))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)
        return hidden_states if self.weight is None else self.weight * hidden_states


class DiffLlamaPolyNorm(nn.Module):
    """PolyNorm (arXiv 2411.03884): w0·n(x³) + w1·n(x²) + w2·n(x) + b with n(z) = z / √(mean(z²) + 1e-6)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply PolyNorm to [..., intermediate_size]. Keeps shape and dtype."""
        x = hidden_states.to(at_least_float32(hidden_states.dtype))
        square = x * x
        first, second, third = (torch.rsqrt((square**i).mean(-1, keepdim=True) + 1e-6) for i in (1, 2, 3))
        w0, w1, w2 = self.weight.to(x.dtype)
        return (((w0 * third * x + w1 * second) * x + w2 * first) * x + self.bias).to(hidden_states.dtype)
