# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What microsoft/unilm's Differential Transformer computes, in plain PyTorch: the truth for converted checkpoints.

It shares no code with this package's model and converter, so that a mistake in them cannot hide in it. Written from
unilm's `Diff-Transformer/multihead_flashdiff_1.py` and `multihead_flashdiff_2.py` (V1, `gqa_layout="grouped"`),
`multihead_diffattn.py` (V1, `gqa_layout="repeated"`) and `Diff-Transformer-V2/multihead_flashdiffv2.py` (V2).
Letters: b rows, n tokens, h differential heads, w the width of a query or key: embed / 2h in V1, the head's in V2.
All is computed in the weights' own dtype, which in float64 is the truth; unilm itself takes the softmax, the norms and
the rotation through float32.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


Variant = Literal["v1", "v2"]
GqaLayout = Literal["grouped", "repeated"]

SUBLN_EPS = 1e-5
ATTENTION_WEIGHTS = {
    "v1": (
        *("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "subln.weight"),
        *("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),
    ),
    "v2": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "lambda_proj.weight"),
}


def lambda_init(layer: int) -> float:
    """λ_init of V1; layers count from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def default_inverse_frequencies(width: int, theta: float = 10000.0) -> Tensor:
    """theta^(-2i / width) for i < width / 2, without scaling for long contexts: [width / 2] in float64."""
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def rotary_angles(positions: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """Angles in radians, in float64: [n], [w / 2] -> [n, w / 2]."""
    return torch.outer(positions.double(), inverse_frequencies.double())


def rotate(x: Tensor, angles: Tensor, attention_scaling: float = 1.0) -> Tensor:
    """Turn every pair (x_2i, x_2i+1) by its angle: [b, n, heads, w], [n, w / 2] -> [b, n, heads, w]."""
    cos, sin = ((attention_scaling * part).to(x.dtype)[:, None] for part in (angles.cos(), angles.sin()))
    even, odd = x.unflatten(-1, (angles.shape[-1], 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension: [..., size], [size] -> [..., size]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def read_heads(variant: Variant, heads: int, key_value_heads: int, gqa_layout: GqaLayout) -> tuple[Tensor, Tensor]:
    """Which key and which value each of the 2h maps reads, map m of head i being the (2i + m)-th: [2h], [2h]."""
    maps = torch.arange(2 * heads)
    if variant == "v2":  # ordinary grouped queries
        shared = maps // (2 * heads // key_value_heads)
        return shared, shared
    group = heads // key_value_heads
    value = maps // 2 // group
    key = {"grouped": 2 * value + maps % 2, "repeated": maps // group}[gqa_layout]
    return key, value


def attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    *,
    variant: Variant,
    layer: int,
    heads: int,
    key_value_heads: int,
    inverse_frequencies: Tensor,
    attention_scaling: float = 1.0,
    gqa_layout: GqaLayout = "grouped",
) -> Tensor:
    """One attention module of unilm, causal: [b, n, embed] -> [b, n, embed].

    Args:
        x: what the module is given, [b, n, embed]; every token sees itself and all before it.
        weights: by the names in `ATTENTION_WEIGHTS`.
        variant: "v1" or "v2".
        layer: its index from 0, on which λ_init of V1 depends.
        heads: h, `num_heads` of unilm.
        key_value_heads: `num_kv_heads` of unilm: in V1 pairs of keys, each with one value; in V2 single keys.
        inverse_frequencies: [w / 2].
        attention_scaling: multiplies cosine and sine, as YaRN and LongRoPE do.
        gqa_layout: which keys the two maps of a V1 head read; matters only under grouped queries.
    """
    key_heads = 2 * key_value_heads if variant == "v1" else key_value_heads
    query = linear(x, weights["q_proj.weight"]).unflatten(-1, (2 * heads, -1))  # [b, n, 2h, w]
    key = linear(x, weights["k_proj.weight"]).unflatten(-1, (key_heads, -1))
    value = linear(x, weights["v_proj.weight"]).unflatten(-1, (key_value_heads, -1))  # 2w wide in V1, w in V2

    angles = rotary_angles(torch.arange(x.shape[1], device=x.device), inverse_frequencies.to(x.device))
    query, key = rotate(query, angles, attention_scaling), rotate(key, angles, attention_scaling)
    key_index, value_index = (index.to(x.device) for index in read_heads(variant, heads, key_value_heads, gqa_layout))

    scores = torch.einsum("bihw,bjhw->bhij", query, key[:, :, key_index]) / math.sqrt(query.shape[-1])
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    maps = scores.masked_fill(future, -math.inf).softmax(-1)  # [b, 2h, n, n]
    first, second = torch.einsum("bhij,bjhv->bihv", maps, value[:, :, value_index]).unflatten(2, (-1, 2)).unbind(3)

    if variant == "v2":
        scale = linear(x, weights["lambda_proj.weight"]).sigmoid()[..., None]  # λ, [b, n, h, 1]
        return linear((first - scale * second).flatten(2), weights["o_proj.weight"])
    exponents = [weights[f"lambda_q{m}"] @ weights[f"lambda_k{m}"] for m in (1, 2)]
    scale = exponents[0].exp() - exponents[1].exp() + lambda_init(layer)
    normed = rms_norm(first - scale * second, weights["subln.weight"], SUBLN_EPS)
    return linear(((1 - lambda_init(layer)) * normed).flatten(2), weights["out_proj.weight"])


def logits(
    input_ids: Tensor,
    weights: Mapping[str, Tensor],
    *,
    variant: Variant,
    heads: int,
    key_value_heads: int,
    rms_norm_eps: float,
    layers: int,
    inverse_frequencies: Tensor,
    attention_scaling: float = 1.0,
    gqa_layout: GqaLayout = "grouped",
) -> Tensor:
    """A Llama, under Llama's names, with unilm's attention in it: [b, n] -> [b, n, vocabulary].

    A weight is looked up when it is used, so `weights` may load and cast lazily. Without `lm_head.weight` the embedding
    is tied. Other arguments are those of `attention`.
    """
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[input_ids]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        x = x + attention(
            rms_norm(x, weights[prefix + "input_layernorm.weight"], rms_norm_eps),
            {name: weights[f"{prefix}self_attn.{name}"] for name in ATTENTION_WEIGHTS[variant]},
            variant=variant,
            layer=layer,
            heads=heads,
            key_value_heads=key_value_heads,
            inverse_frequencies=inverse_frequencies,
            attention_scaling=attention_scaling,
            gqa_layout=gqa_layout,
        )
        normed = rms_norm(x, weights[prefix + "post_attention_layernorm.weight"], rms_norm_eps)
        gate = silu(linear(normed, weights[prefix + "mlp.gate_proj.weight"]))
        up = linear(normed, weights[prefix + "mlp.up_proj.weight"])
        x = x + linear(gate * up, weights[prefix + "mlp.down_proj.weight"])
    return linear(rms_norm(x, weights["model.norm.weight"], rms_norm_eps), weights.get("lm_head.weight", embedding))
