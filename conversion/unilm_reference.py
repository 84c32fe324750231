# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Reference of microsoft/unilm's modules in plain PyTorch, with which converted checkpoints are compared.

It shares no code with this package's model and conversions, so that it cannot share their mistakes. Written from
unilm's `Diff-Transformer/multihead_flashdiff_1.py` and `multihead_flashdiff_2.py` (V1, `gqa_layout="grouped"`),
`multihead_diffattn.py` (V1, `gqa_layout="repeated"`) and `Diff-Transformer-V2/multihead_flashdiffv2.py` (V2).
Letters: b rows, n tokens, h differential heads, w the width of a query or key: embed / 2h in V1, the head's in V2.
Everything is computed in the weights' dtype. (unilm computes softmax, norms and rotation in float32.) Variant and sizes
follow from the weights.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


SUBLN_EPS = 1e-5

T = TypeVar("T")


def under(weights: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the weights whose names start with a prefix, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def rotate(x: Tensor, inverse_frequencies: Tensor, scaling: float) -> Tensor:
    """Rotate every pair (x_2i, x_2i+1) by position × frequency: [b, n, heads, w], [w / 2] -> [b, n, heads, w]."""
    angles = torch.outer(torch.arange(x.shape[1]).double(), inverse_frequencies.double())
    cos, sin = ((scaling * part).to(x.dtype)[:, None] for part in (angles.cos(), angles.sin()))
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm over the last dimension: [..., size], [size] -> [..., size]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    *,
    layer: int,
    inverse_frequencies: Tensor,
    attention_scaling: float = 1.0,
    gqa_layout: str = "grouped",
) -> Tensor:
    """Compute one causal attention module of unilm: [b, n, embed] -> [b, n, embed].

    Args:
        x: hidden states [b, n, embed].
        weights: under unilm's names.
        layer: index from 0, which determines λ_init of V1.
        inverse_frequencies: [w / 2].
        attention_scaling: multiplies cosine and sine, as YaRN and LongRoPE do.
        gqa_layout: keys that the two maps of a V1 head read under grouped queries.
    """
    v1, width = "subln.weight" in weights, 2 * len(inverse_frequencies)
    query = linear(x, weights["q_proj.weight"]).unflatten(-1, (-1, width))  # [b, n, 2h, w]
    key = linear(x, weights["k_proj.weight"]).unflatten(-1, (-1, width))
    value = linear(x, weights["v_proj.weight"]).unflatten(-1, (-1, 2 * width if v1 else width))
    query, key = (rotate(heads, inverse_frequencies, attention_scaling) for heads in (query, key))

    # Which value and which key each map reads, map m of head i being the (2i + m)-th: [2h]
    maps = torch.arange(query.shape[2])
    value_index = key_index = maps // (len(maps) // value.shape[2])
    if v1 and gqa_layout == "grouped":
        key_index = 2 * value_index + maps % 2
    elif v1:
        key_index = maps // (len(maps) // key.shape[2])

    scores = torch.einsum("bihw,bjhw->bhij", query, key[:, :, key_index]) / math.sqrt(width)
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    softmaxes = scores.masked_fill(future, -math.inf).softmax(-1)  # [b, 2h, n, n]
    outputs = torch.einsum("bhij,bjhv->bihv", softmaxes, value[:, :, value_index])
    first, second = outputs.unflatten(2, (-1, 2)).unbind(3)

    if not v1:
        scale = linear(x, weights["lambda_proj.weight"]).sigmoid()[..., None]  # λ, [b, n, h, 1]
        return linear((first - scale * second).flatten(2), weights["o_proj.weight"])
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
    exponents = [weights[f"lambda_q{m}"] @ weights[f"lambda_k{m}"] for m in (1, 2)]
    scale = exponents[0].exp() - exponents[1].exp() + lambda_init
    normed = rms_norm(first - scale * second, weights["subln.weight"], SUBLN_EPS)
    return linear(((1 - lambda_init) * normed).flatten(2), weights["out_proj.weight"])


def logits(input_ids: Tensor, weights: Mapping[str, Tensor], *, rms_norm_eps: float, **arguments: Any) -> Tensor:
    """Compute the logits of a Llama with unilm's attention, under Llama's names: [b, n] -> [b, n, vocabulary].

    Without `lm_head.weight` the embedding is tied. Other arguments are those of `attention`.
    """
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[input_ids]
    for layer in range(sum(name.endswith("input_layernorm.weight") for name in weights)):
        own = under(weights, f"model.layers.{layer}.")
        normed = rms_norm(x, own["input_layernorm.weight"], rms_norm_eps)
        x = x + attention(normed, under(own, "self_attn."), layer=layer, **arguments)
        normed = rms_norm(x, own["post_attention_layernorm.weight"], rms_norm_eps)
        gate, up = silu(linear(normed, own["mlp.gate_proj.weight"])), linear(normed, own["mlp.up_proj.weight"])
        x = x + linear(gate * up, own["mlp.down_proj.weight"])
    return linear(rms_norm(x, weights["model.norm.weight"], rms_norm_eps), weights.get("lm_head.weight", embedding))
