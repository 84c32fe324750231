# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor operations of weight maps.

Each takes a tensor of the source, the configuration of our model, and the other tensors that its rule names. Letters in
shapes: H query heads, s of them signals (h of 2h, where each has its own noise head), D width of values, d = D/2, w
rotated width (d in V1, D in V2). `...` is [hidden] for a weight and nothing for a bias.
"""

import torch

from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


def sizes(config: DiffLlamaConfig) -> tuple[int, int, int]:
    """Return the numbers of query heads (softmax maps) and key/value heads, and D."""
    assert config.num_key_value_heads is not None  # set by the configuration's constructor
    assert config.head_dim is not None
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


# Llama -> V2


def append_noise_queries(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Append the mean of each group's queries as its noise query: [s·D, ...] -> [H·D, ...]. One signal is copied."""
    signals = tensor.unflatten(0, (config.num_noise_heads, config.signals_per_noise, -1))
    return torch.cat((signals, signals.mean(1, keepdim=True)), dim=1).flatten(0, 2)


def add_group_mean(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Add the mean of its group's columns to each signal head's: [hidden, s·D] -> the same. Doubles a single one.

    With λ = 1/2, and if the noise output n is the mean of the group's outputs o_s, the sum of W_s·o_s over the group
    equals that of (W_s + mean W)·(o_s - n/2).
    """
    columns = tensor.unflatten(1, (config.num_noise_heads, config.signals_per_noise, -1))
    return (columns + columns.mean(2, keepdim=True)).flatten(1)


# Fused projections -> their parts, before any other operation


def _key_rows(config: DiffLlamaConfig) -> int:
    """Return the number of rows of keys, which equals that of values, at the end of fused rows."""
    _, key_value_heads, width = sizes(config)
    return key_value_heads * width


def query_rows(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Return the rows of queries, from fused rows of queries, keys and values."""
    return tensor[: -2 * _key_rows(config)]


def key_rows(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Return the rows of keys: [num_key_value_heads·D, ...]."""
    return tensor[-2 * _key_rows(config) : -_key_rows(config)]


def value_rows(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Return the rows of values: [num_key_value_heads·D, ...]."""
    return tensor[-_key_rows(config) :]


def first_half(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Return the gate of a fused gate and up projection: [2n, ...] -> [n, ...]."""
    return tensor.chunk(2)[0]


def second_half(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Return the up projection of a fused gate and up projection: [2n, ...] -> [n, ...]."""
    return tensor.chunk(2)[1]


# Llama -> V1, a warm start: the heads that read two neighbouring key/value heads become the maps of one


def pair_query_heads(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Turn heads on the first key/value head of a pair into signals: [2s·d, ...] -> [H·d, ...].

    The noise of a group is the mean of the heads in the same places on the pair's second key/value head.

    Heads come as [key/value pair, its first or second, group, place in the group].
    """
    groups = tensor.unflatten(0, (sizes(config)[1], 2, -1, config.signals_per_noise, config.rotary_dim))
    signals, noise = groups.unbind(1)
    return torch.cat((signals, noise.mean(2, keepdim=True)), dim=2).flatten(0, 3)


def pair_head_columns(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Append the columns of its partner to each signal head's, because a head's value joins both: [hidden, 2s·d] ->
    the same. The partner reads the other key/value head of the pair."""
    columns = tensor.unflatten(1, (sizes(config)[1], 2, -1, config.rotary_dim))
    return columns.transpose(2, 3).flatten(1)


# transformers' diffllama <-> V1: maps (i, i + h) <-> neighbours


def neighbours_from_halves(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Make vectors i and i + n neighbours: [2n·d, ...] -> the same."""
    return tensor.unflatten(0, (2, -1, sizes(config)[2] // 2)).transpose(0, 1).flatten(0, 2)


def halves_from_neighbours(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Invert `neighbours_from_halves`."""
    return tensor.unflatten(0, (-1, 2, sizes(config)[2] // 2)).transpose(0, 1).flatten(0, 2)


def scale_to_their_epsilon(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Scale values for a head norm with ε = `head_norm_eps` to values for one with ε = `rms_norm_eps`.

    RMSNorm with ε of c·x is RMSNorm with ε/c² of x.
    """
    return tensor * (config.rms_norm_eps / config.head_norm_eps) ** 0.5


def fold_head_norm(tensor: torch.Tensor, config: DiffLlamaConfig, weight: torch.Tensor) -> torch.Tensor:
    """Multiply the columns that read the head norm by its weight: [hidden, h·D], [D] -> [hidden, h·D]."""
    return (tensor * weight.repeat(tensor.shape[1] // len(weight))).to(tensor.dtype)


# Perdix -> ours


def flip(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Reverse PolyNorm's weights, from the linear term first to the cubic term first: [3] -> [3]."""
    return tensor.flip(0)


# microsoft/unilm <-> ours: rotated pairs (2i, 2i + 1) <-> (i, i + w/2)


def half_from_interleaved(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Move even rows before odd rows within each vector: [n·w, ...] -> the same."""
    return tensor.unflatten(0, (-1, config.rotary_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def interleaved_from_half(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Invert `half_from_interleaved`."""
    return tensor.unflatten(0, (-1, 2, config.rotary_dim // 2)).transpose(1, 2).flatten(0, 2)


def repeat_keys(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Repeat each key for each of its queries, so that every head has two keys: [2n·d, ...] -> [2h·d, ...]."""
    keys = tensor.unflatten(0, (-1, sizes(config)[2] // 2))
    return keys.repeat_interleave(config.num_attention_heads // keys.shape[0], dim=0).flatten(0, 1)


def repeat_values(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Repeat each value for each of its heads: [n·D, ...] -> [h·D, ...]."""
    values = tensor.unflatten(0, (-1, sizes(config)[2]))
    return values.repeat_interleave(config.num_attention_heads // 2 // values.shape[0], dim=0).flatten(0, 1)
