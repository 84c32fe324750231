# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor operations that weight maps name.

Each takes a tensor of the source, the configuration of our model, and whatever other tensors its rule adds. Letters as
in DESIGN: h differential heads, D width of values, d = D/2, w the width that is rotated (d in V1, D in V2). `...` is
[hidden] for a weight and nothing for a bias.
"""

import torch

from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


def sizes(config: DiffLlamaConfig) -> tuple[int, int, int]:
    """Numbers of query heads (softmax maps) and key/value heads, and D."""
    assert config.num_key_value_heads is not None  # set when the configuration is made
    assert config.head_dim is not None
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


# Llama -> V2


def duplicate_heads(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[h·D, ...] -> [2h·D, ...]: each head's D rows twice, as neighbours."""
    return tensor.unflatten(0, (-1, sizes(config)[2])).repeat_interleave(2, dim=0).flatten(0, 1)


def double(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Twice the tensor."""
    return tensor * 2


# Fused projections -> their parts, before any other operation


def _key_rows(config: DiffLlamaConfig) -> int:
    """How many rows of keys, and of values, come last."""
    _, key_value_heads, width = sizes(config)
    return key_value_heads * width


def query_rows(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """The queries' rows of queries, keys and values one below the other."""
    return tensor[: -2 * _key_rows(config)]


def key_rows(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """The keys' rows: -> [num_key_value_heads·D, ...]."""
    return tensor[-2 * _key_rows(config) : -_key_rows(config)]


def value_rows(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """The values' rows: -> [num_key_value_heads·D, ...]."""
    return tensor[-_key_rows(config) :]


def first_half(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[2n, ...] -> [n, ...]: of a gate above an up projection, the gate."""
    return tensor.chunk(2)[0]


def second_half(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[2n, ...] -> [n, ...]: of a gate above an up projection, the up projection."""
    return tensor.chunk(2)[1]


# Llama -> V1, a warm start: the heads that read two neighbouring key/value heads become the maps of one


def pair_query_heads(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[2h·d, ...] -> the same: query heads of neighbouring key/value heads become neighbours.

    Heads come as [key/value pair, its first or second, group]; a pair of maps has to be [key/value pair, group, map].
    """
    maps, key_value_heads, width = sizes(config)
    groups = maps // 2 // key_value_heads
    return tensor.unflatten(0, (key_value_heads, 2, groups, width // 2)).transpose(1, 2).flatten(0, 3)


def pair_head_columns(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[hidden, 2h·d] -> the same: the output projection's columns in the order of `pair_query_heads`."""
    return pair_query_heads(tensor.T, config).T


# transformers' diffllama <-> V1: maps (i, i + h) <-> neighbours


def neighbours_from_halves(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[2n·d, ...] -> the same: vector i and vector i + n become neighbours."""
    return tensor.unflatten(0, (2, -1, sizes(config)[2] // 2)).transpose(0, 1).flatten(0, 2)


def halves_from_neighbours(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """The inverse of `neighbours_from_halves`."""
    return tensor.unflatten(0, (-1, 2, sizes(config)[2] // 2)).transpose(0, 1).flatten(0, 2)


def scale_to_our_epsilon(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Values for a head norm with ε = `head_norm_eps`, from values for one with ε = `rms_norm_eps`.

    RMSNorm with ε of c·x is RMSNorm with ε/c² of x.
    """
    return tensor * (config.head_norm_eps / config.rms_norm_eps) ** 0.5


def scale_to_their_epsilon(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """The inverse of `scale_to_our_epsilon`."""
    return tensor * (config.rms_norm_eps / config.head_norm_eps) ** 0.5


def fold_head_norm(tensor: torch.Tensor, config: DiffLlamaConfig, weight: torch.Tensor) -> torch.Tensor:
    """[hidden, h·D], [D] -> [hidden, h·D]: the head norm's weight goes into the columns that read it."""
    return (tensor * weight.repeat(tensor.shape[1] // len(weight))).to(tensor.dtype)


# microsoft/unilm <-> ours: rotated pairs (2i, 2i + 1) <-> (i, i + w/2)


def half_from_interleaved(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[n·w, ...] -> the same: within each vector, even rows, then odd rows."""
    return tensor.unflatten(0, (-1, config.rotary_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def interleaved_from_half(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """The inverse of `half_from_interleaved`."""
    return tensor.unflatten(0, (-1, 2, config.rotary_dim // 2)).transpose(1, 2).flatten(0, 2)


def repeat_keys(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[2n·d, ...] -> [2h·d, ...]: each key as often as its queries are many, so that every head has its two keys."""
    keys = tensor.unflatten(0, (-1, sizes(config)[2] // 2))
    return keys.repeat_interleave(config.num_attention_heads // keys.shape[0], dim=0).flatten(0, 1)


def repeat_values(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[n·D, ...] -> [h·D, ...]: each value as often as its heads are many."""
    values = tensor.unflatten(0, (-1, sizes(config)[2]))
    return values.repeat_interleave(config.num_attention_heads // 2 // values.shape[0], dim=0).flatten(0, 1)
