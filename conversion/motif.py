# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Motif 2 (Motif-2.6B, whose heads are pairs, and Motif-2-12.7B, with groups of 4 signals and a noise) <-> DIFF V1.

Motif's heads, rotation and PolyNorm have our order: tensors are renamed, and no value changes. λ_init follows Motif's
own schedule. Motif counts heads by vectors of width d, we count keys and values of width D = 2d.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffllama.checkpoints.json_files import write_json
from diffllama.configuration import SHARED_FIELDS
from diffllama.conversion import motif_reference
from diffllama.conversion.llama import BODY
from diffllama.conversion.reference_models import require
from diffllama.conversion.transformers_diffllama import LAMBDAS, refuse
from diffllama.conversion.weight_map import Rule, WeightMap, inverse
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.modeling_diff.differential_attention import exponential_lambda_init


MODEL_TYPE = "Motif"

_ATTENTION, _ACTIVATION = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp.act_fn."
ACTIVATION = (f"{_ACTIVATION}weight", f"{_ACTIVATION}bias")
_COPIED = (*BODY, *ACTIVATION, *LAMBDAS, *(f"{_ATTENTION}{name}_proj.weight" for name in "qkvo"))
FROM_MOTIF: WeightMap = {
    **{name: Rule(name) for name in _COPIED},
    f"{_ATTENTION}subln.weight": Rule(f"{_ATTENTION}head_norm.weight"),
    f"{_ATTENTION}rotary_emb.inv_freq": None,  # computed from the configuration
}
TO_MOTIF = inverse(FROM_MOTIF)

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
REQUIRED = (*_SIZES, "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act")
COPIED = (
    *(field for field in SHARED_FIELDS if field not in ("attention_bias", "mlp_bias", "dtype")),
    *("rope_theta", "rope_scaling", "original_max_position_embeddings"),
)
"""Fields with the same meaning in our configuration, or that it refuses."""

KNOWN: dict[str, object] = {
    "hidden_act": "poly_norm",
    "k_ratio": 1,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    **dict.fromkeys(("use_bias", "attention_bias", "qkv_bias", "mlp_bias", "use_sliding_window"), False),
}
"""Fields of Motif -> the only value that our model supports."""

MOTIF_3 = ("mhc_enabled", "kv_lora_rank", "q_lora_rank", "num_experts", "moe_intermediate_size")
"""Fields of Motif 3, which has the same `model_type` and `architectures`."""


def lambda_init(layers: int) -> list[float]:
    """Compute λ_init of each layer. The first is 0.8 - 0.6·exp(0.3), the second is the paper's first."""
    return [exponential_lambda_init(layer - 1) for layer in range(layers)]


def translate(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the fields of Motif's config.json. Raises `ValueError` for Motif 3 and for unsupported values."""
    if of_motif_3 := [field for field in MOTIF_3 if fields.get(field)]:
        raise ValueError(
            f"`{of_motif_3[0]}` is a field of Motif 3, another architecture. Only Motif 2 can be converted."
        )
    require(fields, REQUIRED)
    if faults := [
        f"`{field}` must be {value!r}, got {fields[field]!r}"
        for field, value in KNOWN.items()
        if fields.get(field) is not None and fields[field] != value
    ]:
        raise ValueError(f"{'; '.join(faults)}.")
    heads, keys = fields["num_attention_heads"], fields["num_key_value_heads"]
    noise_heads, width = fields.get("num_noise_heads"), fields.get("head_dim")
    if noise_heads is None and heads != keys:
        raise ValueError(
            f"`num_noise_heads` is missing: {heads} query heads on {keys} keys (`num_key_value_heads`) may come in "
            f"pairs or in larger groups. If in pairs, add `num_noise_heads`: {heads // 2}."
        )
    if keys % 2:
        raise ValueError(f"`num_key_value_heads` must be even (two keys for each value), got {keys}.")
    if width is None and fields["hidden_size"] % heads:
        raise ValueError(f"`head_dim` is missing, and `hidden_size` is not a multiple of {heads} heads.")
    if not {"rope_theta", "rope_parameters"} & fields.keys():
        require(fields, ["rope_theta"])
    eps = {"head_norm_eps": fields["attn_rms_norm_eps"]} if "attn_rms_norm_eps" in fields else {}
    return (
        dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        | {field: fields[field] for field in COPIED if field in fields}
        | eps
        | {
            "num_attention_heads": heads,
            "num_noise_heads": heads // 2 if noise_heads is None else noise_heads,
            "num_key_value_heads": keys // 2,
            "head_dim": 2 * (width or fields["hidden_size"] // heads),
            "lambda_init": lambda_init(fields["num_hidden_layers"]),
        }
    )


def convert_config_back(config: DiffLlamaConfig) -> DiffLlamaConfig:
    """Return Motif's form of a configuration. Raises `ValueError` for a feature that Motif lacks."""
    schedule = lambda_init(config.num_hidden_layers)
    given = config.lambda_init
    equal = isinstance(given, list) and all(map(partial(math.isclose, rel_tol=1e-6), given, schedule))
    refuse(
        config,
        "Motif",
        diff_variant="v1",
        lambda_init=given if equal else schedule,
        head_norm=True,
        head_norm_affine=True,
        hidden_act="poly_norm",
        gated_mlp=True,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        use_qk_norm=False,
        no_rope_layers=None,
        sliding_window=None,
    )
    return config


def save_config(config: DiffLlamaConfig, folder: Path) -> None:
    """Write Motif's config.json, without fields that the published ones derive from others."""
    assert config.num_key_value_heads is not None  # set by the configuration's constructor
    rope = dict(config.rope_parameters or {})
    theta, rope_type = rope.pop("rope_theta"), rope["rope_type"]
    heads, keys = config.num_attention_heads, 2 * config.num_key_value_heads
    fields = {field: getattr(config, field) for field in COPIED if hasattr(config, field)} | {
        "architectures": ["MotifForCausalLM"],
        "model_type": MODEL_TYPE,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "attn_rms_norm_eps": config.head_norm_eps,
        "use_bias": False,
        "rope_theta": theta,
        "rope_scaling": None if rope_type == "default" else rope,
        "torch_dtype": str(config.dtype).removeprefix("torch."),
    }
    del fields["rope_parameters"]
    if config.rotary_dim * heads != config.hidden_size:
        fields["head_dim"] = config.rotary_dim
    if heads != keys:
        fields |= {"num_noise_heads": config.num_noise_heads, "k_ratio": 1}
    write_json(folder / "config.json", fields)


def logits(input_ids: torch.Tensor, weights: Mapping[str, torch.Tensor], config: DiffLlamaConfig) -> torch.Tensor:
    """Compute logits with Motif's formulas, from weights under Motif's names."""
    rotary = LlamaRotaryEmbedding(config.rotary_config())
    return motif_reference.motif_logits(
        input_ids,
        weights,
        rms_norm_eps=config.rms_norm_eps,
        attn_rms_norm_eps=config.head_norm_eps,
        inverse_frequencies=rotary.inv_freq,
        attention_scaling=rotary.attention_scaling,
    )
