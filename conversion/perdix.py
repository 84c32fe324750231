# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Perdix (theprismdata/Perdix) -> DIFF V1.

Perdix's heads have our order. It rotates the pairs (2i, 2i + 1) of a vector, we rotate (i, i + d/2). Its PolyNorm has
the linear term first, ours the cubic one. Its feed-forward network has no gate.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffllama.conversion import motif_reference
from diffllama.conversion.motif import ACTIVATION
from diffllama.conversion.operations import flip, half_from_interleaved
from diffllama.conversion.reference_models import require
from diffllama.conversion.transformers_diffllama import LAMBDAS
from diffllama.conversion.weight_map import Rule, WeightMap
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


MODEL_TYPE = "perdix"

_OURS, _THEIRS = "model.layers.{i}.", "blocks.{i}."
FROM_PERDIX: WeightMap = {
    "tok_emb.weight": Rule("model.embed_tokens.weight"),
    "final_norm.weight": Rule("model.norm.weight"),
    "lm_head.weight": Rule("lm_head.weight"),
    f"{_THEIRS}attn_norm.weight": Rule(f"{_OURS}input_layernorm.weight"),
    f"{_THEIRS}ffn_norm.weight": Rule(f"{_OURS}post_attention_layernorm.weight"),
    f"{_THEIRS}attn.wq.weight": Rule(f"{_OURS}self_attn.q_proj.weight", (half_from_interleaved,)),
    f"{_THEIRS}attn.wk.weight": Rule(f"{_OURS}self_attn.k_proj.weight", (half_from_interleaved,)),
    f"{_THEIRS}attn.wv.weight": Rule(f"{_OURS}self_attn.v_proj.weight"),
    f"{_THEIRS}attn.wo.weight": Rule(f"{_OURS}self_attn.o_proj.weight"),
    f"{_THEIRS}attn.subln.weight": Rule(f"{_OURS}self_attn.head_norm.weight"),
    **{name.replace(f"{_OURS}self_attn.", f"{_THEIRS}attn."): Rule(name) for name in LAMBDAS},
    f"{_THEIRS}ffn.up.weight": Rule(f"{_OURS}mlp.up_proj.weight"),
    f"{_THEIRS}ffn.down.weight": Rule(f"{_OURS}mlp.down_proj.weight"),
    f"{_THEIRS}ffn.act.weight": Rule(ACTIVATION[0], (flip,)),
    f"{_THEIRS}ffn.act.bias": Rule(ACTIVATION[1]),
}

FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
"""Fields of Perdix's configuration class -> ours."""


def translate(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Translate fields of Perdix's config.json to ours. Raises `ValueError` for missing or contradictory ones."""
    require(fields, (*FIELDS, "n_heads"))
    heads, width = fields["n_heads"], fields["dim"]
    if not (type(heads) is type(width) is int and heads > 0 and width % heads == 0):
        raise ValueError(f"`dim` must be a multiple of `n_heads`, got {width!r} and {heads!r}.")
    optional = ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    return (
        {field: fields.get(field) for field in optional}
        | {ours: fields[theirs] for theirs, ours in FIELDS.items()}
        | {
            "num_attention_heads": 2 * heads,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "head_norm_eps": fields["norm_eps"],
            "hidden_act": "poly_norm",
            "gated_mlp": False,
        }
    )


def logits(input_ids: torch.Tensor, weights: Mapping[str, torch.Tensor], config: DiffLlamaConfig) -> torch.Tensor:
    """Compute logits by Perdix's formulas, from weights under its names."""
    return motif_reference.perdix_logits(
        input_ids,
        weights,
        norm_eps=config.rms_norm_eps,
        inverse_frequencies=LlamaRotaryEmbedding(config.rotary_config()).inv_freq,
    )
