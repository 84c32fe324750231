# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Llama -> DIFF V2, with bit-identical logits.

Every query head is copied, so both maps of a head are the source's map, and λ's projection is zero, so λ = sigmoid(0)
= 1/2. Then o1 - λ·o2 = o/2 exactly, and twice the output projection, also exact in floating point, makes up for it.
(In float16, half of a number below 2⁻¹³ is subnormal and may lose its last bit.)
Training tells the two maps apart: their gradients are g and -g/2.
"""

import torch
from transformers import LlamaConfig

from diffllama.configuration import SHARED_FIELDS
from diffllama.conversion.weight_map import Rule, WeightMap
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


def duplicate_heads(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """[h·D, ...] -> [2h·D, ...]: each head's D rows twice, as neighbours."""
    return tensor.unflatten(0, (-1, config.head_dim)).repeat_interleave(2, dim=0).flatten(0, 1)


def double(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Twice the tensor."""
    return tensor * 2


_ATTENTION, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
_COPIED = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.{i}.input_layernorm.weight",
    "model.layers.{i}.post_attention_layernorm.weight",
    *(f"{_ATTENTION}{name}_proj.{kind}" for name in ("k", "v") for kind in ("weight", "bias")),
    *(f"{_MLP}{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")),
    f"{_ATTENTION}o_proj.bias",
)

WEIGHT_MAP: WeightMap = {name: Rule(name) for name in _COPIED} | {
    f"{_ATTENTION}q_proj.weight": Rule(f"{_ATTENTION}q_proj.weight", duplicate_heads),
    f"{_ATTENTION}q_proj.bias": Rule(f"{_ATTENTION}q_proj.bias", duplicate_heads),
    f"{_ATTENTION}o_proj.weight": Rule(f"{_ATTENTION}o_proj.weight", double),
}


def new_weights(config: DiffLlamaConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Our tensors that no tensor of the source becomes: λ's projections, zero."""
    shape = (config.num_attention_heads // 2, config.hidden_size)
    return {
        f"{_ATTENTION}lambda_proj.weight".format(i=i): torch.zeros(shape, dtype=dtype)
        for i in range(config.num_hidden_layers)
    }


def convert_config(source: LlamaConfig) -> DiffLlamaConfig:
    """The V2 configuration with the same heads, each of two maps.

    Raises:
        ValueError: the source is no Llama or uses a feature that a differential Llama lacks.
    """
    if source.model_type != "llama":
        raise ValueError(f"`model_type` of the source must be 'llama', got {source.model_type!r}.")
    if getattr(source, "quantization_config", None) is not None:
        raise ValueError("The source is quantized (`quantization_config`): convert the original weights instead.")
    return DiffLlamaConfig(
        **{field: getattr(source, field) for field in SHARED_FIELDS},
        diff_variant="v2",
        num_attention_heads=2 * source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.head_dim,
    )
