# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Llama and related models -> DIFF V2 with bit-identical logits, or DIFF V1 as a warm start.

V2: every query head is copied, so both maps of a head are the source's map. The projection of λ is zero, so λ =
sigmoid(0) = 1/2. Then o1 - λ·o2 = o/2, and the output projection is doubled; floating point computes both exactly. (In
float16, half of a number below 2⁻¹³ is subnormal and may lose its last bit.)
The two maps stay identical until you train the model: their gradients are g and -g/2.

V1: two heads that read neighbouring key/value heads (under multi-head attention, two neighbouring heads) become the two
maps of one head. λ vectors, λ_init and head norm begin as in the paper. The result is another function than the source,
and has to be trained.

Fewer noise heads than signal heads (`noise_heads`) are a warm start too. V2: the noise query of a group is the mean of
its signals', and the output projection is exact where the noise head's output is the mean of its group's outputs, as it
is in a group of one. V1: the heads that read the first key/value head of a pair are signals, and the mean of the others
in the same places is their group's noise.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from diffllama.configuration import SHARED_FIELDS
from diffllama.conversion import operations
from diffllama.conversion.weight_map import Operation, Rule, WeightMap
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.modeling_diff.modeling_diffllama import LAMBDA_VECTORS


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3")

_ATTENTION, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
BODY = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.{i}.input_layernorm.weight",
    "model.layers.{i}.post_attention_layernorm.weight",
    *(f"{_MLP}{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")),
)
"""Tensors outside of attention, which have Llama's names in every layout."""


def _weight_map(query: tuple[Operation, ...], output: tuple[Operation, ...]) -> WeightMap:
    copied = (
        *BODY,
        *(f"{_ATTENTION}{name}_proj.{kind}" for name in ("k", "v") for kind in ("weight", "bias")),
        f"{_ATTENTION}o_proj.bias",
        f"{_ATTENTION}q_norm.weight",  # Qwen3
        f"{_ATTENTION}k_norm.weight",
    )
    return {name: Rule(name) for name in copied} | {
        f"{_ATTENTION}q_proj.weight": Rule(f"{_ATTENTION}q_proj.weight", query),
        f"{_ATTENTION}q_proj.bias": Rule(f"{_ATTENTION}q_proj.bias", query),
        f"{_ATTENTION}o_proj.weight": Rule(f"{_ATTENTION}o_proj.weight", output),
        f"{_ATTENTION}qkv_proj.weight": (  # Phi-3
            Rule(f"{_ATTENTION}q_proj.weight", (operations.query_rows, *query)),
            Rule(f"{_ATTENTION}k_proj.weight", (operations.key_rows,)),
            Rule(f"{_ATTENTION}v_proj.weight", (operations.value_rows,)),
        ),
        f"{_MLP}gate_up_proj.weight": (
            Rule(f"{_MLP}gate_proj.weight", (operations.first_half,)),
            Rule(f"{_MLP}up_proj.weight", (operations.second_half,)),
        ),
        f"{_ATTENTION}rotary_emb.inv_freq": None,  # in old checkpoints; computed from the configuration
        "model.rotary_emb.inv_freq": None,
    }


WEIGHT_MAPS = {
    "v2": _weight_map((operations.append_noise_queries,), (operations.add_group_mean,)),
    "v1": _weight_map((operations.pair_query_heads,), (operations.pair_head_columns,)),
}
"""Variant -> weight map."""


def new_weights(config: DiffLlamaConfig) -> dict[str, Callable[[], torch.Tensor]]:
    """Create the tensors that the source lacks, always with the same values: λ, and V1's head norm."""
    heads, width = config.num_signal_heads, config.rotary_dim
    new: dict[str, Callable[[], torch.Tensor]] = {}
    for i in range(config.num_hidden_layers):
        prefix = _ATTENTION.format(i=i)
        if config.diff_variant == "v2":
            new[f"{prefix}lambda_proj.weight"] = lambda: torch.zeros(heads, config.hidden_size)
            continue
        new[f"{prefix}head_norm.weight"] = lambda: torch.ones(2 * width)
        for seed, name in enumerate(LAMBDA_VECTORS, start=4 * i):

            def normal(seed: int = seed) -> torch.Tensor:
                return config.lambda_std_dev * torch.randn(width, generator=torch.Generator().manual_seed(seed))

            new[f"{prefix}{name}"] = normal
    return new


def convert_config(source: PreTrainedConfig, variant: str, noise_heads: int | None = None) -> DiffLlamaConfig:
    """Return the configuration with the same heads as signals (V2), or with pairs of them as heads (V1).

    Raises `ValueError` for a feature that a differential Llama lacks, and for heads that cannot be paired or grouped.
    """
    for field in ("resid_pdrop", "embd_pdrop"):  # Phi-3
        if dropout := getattr(source, field, 0.0):
            raise ValueError(f"`{field}` of the source must be 0 (diffllama has no such dropout), got {dropout}.")
    heads, key_value_heads = source.num_attention_heads, source.num_key_value_heads
    width = getattr(source, "head_dim", None) or source.hidden_size // heads
    if variant == "v1":
        if key_value_heads % 2:
            raise ValueError(
                "`num_key_value_heads` of the source must be even for variant='v1', which pairs neighbouring "
                f"key/value heads, got {key_value_heads}. Use variant='v2'."
            )
        heads, key_value_heads, width = heads // 2, key_value_heads // 2, 2 * width
    noise_heads = heads if noise_heads is None else noise_heads
    if noise_heads < 1 or heads % noise_heads or noise_heads % key_value_heads:
        raise ValueError(
            f"`noise_heads` must divide the signal heads ({heads}) and be a multiple of the key/value heads "
            f"({key_value_heads}), so that a group reads one of them, got {noise_heads}."
        )
    attention = {
        "num_attention_heads": heads + noise_heads,
        "num_noise_heads": noise_heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": width,
    }
    # A configuration keeps unknown fields. Only those that the source's model reads are taken over
    kind = source.model_type
    fields = {field: getattr(source, field) for field in SHARED_FIELDS if hasattr(source, field)}
    fields["attention_bias"] = kind == "qwen2" or (kind in ("llama", "qwen3", "smollm3") and source.attention_bias)
    fields["attention_out_bias"] = kind != "qwen2" and fields["attention_bias"]
    fields["mlp_bias"] = kind in ("llama", "smollm3") and source.mlp_bias
    if kind in ("mistral", "phi3") and source.sliding_window is not None:
        fields["sliding_window"] = source.sliding_window  # in every layer
    elif kind in ("qwen2", "qwen3", "smollm3") and "sliding_attention" in source.layer_types:
        fields |= {"sliding_window": source.sliding_window, "layer_types": source.layer_types}
    if kind == "smollm3" and not all(source.no_rope_layers):
        fields["no_rope_layers"] = source.no_rope_layers[: source.num_hidden_layers]
    return DiffLlamaConfig(**fields, **attention, diff_variant=variant, use_qk_norm=kind == "qwen3")
