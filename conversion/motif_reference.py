# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Reference of Motif 2 and Perdix in plain PyTorch, with which converted checkpoints are compared.

It shares no code with this package's model and conversions, so that it cannot share their mistakes. Written from the
formulas of arXiv 2410.05258 (differential attention), 2510.06949 (groups) and 2411.03884 (PolyNorm), in the layouts of
vLLM's `motif.py` and `grouped_diff_attn.py`, of mlx-motif's `model.py` and of Perdix's `modeling_perdix.py`.
Letters: b rows, n tokens, H query heads of width d, s of them signals. Query heads come group by group: signals, then
the noise that is subtracted from each of them. In Motif 2.6B and in Perdix a group is a pair. Everything is computed in
the weights' dtype. (The models compute softmax, λ, norms and PolyNorm in float32.) Sizes follow from the weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear


POLY_NORM_EPS = 1e-6

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(vectors [b, n, heads, d], cosines [n, 1, d / 2], sines) -> the rotated vectors."""


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (x_i, x_i+d/2), as in Motif."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (x_2i, x_2i+1), as in Perdix."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm over the last dimension: [..., size], [size] -> [..., size]."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute w0·n(x³) + w1·n(x²) + w2·n(x) + b, in Motif's order: [..., width], [3], [1] -> [..., width]."""
    powers = [x**exponent for exponent in (3, 2, 1)]
    normed = [power / (power.square().mean(-1, keepdim=True) + POLY_NORM_EPS).sqrt() for power in powers]
    return weight[0] * normed[0] + weight[1] * normed[1] + weight[2] * normed[2] + bias


def attention(
    x: Tensor,
    projections: Sequence[Tensor],
    lambdas: Sequence[Tensor],
    subln: Tensor,
    *,
    lambda_init: float,
    eps: float,
    rotation: Rotation,
    inverse_frequencies: Tensor,
    attention_scaling: float = 1.0,
) -> Tensor:
    """Compute one causal attention module: [b, n, hidden] -> [b, n, hidden].

    Args:
        x: hidden states [b, n, hidden].
        projections: weights of queries [H·d, hidden], keys and values [key/value heads·2d, hidden] and output
            [hidden, s·2d].
        lambdas: q1, k1, q2 and k2, each [d].
        subln: the head norm's weight, [2d].
        lambda_init: λ_init of the layer.
        eps: ε of the head norm.
        rotation: function that rotates pairs of a vector.
        inverse_frequencies: [d / 2].
        attention_scaling: multiplies cosine and sine, as YaRN does.
    """
    q_proj, k_proj, v_proj, o_proj = projections
    d = len(lambdas[0])
    query = linear(x, q_proj).unflatten(-1, (-1, d))  # [b, n, H, d]
    key = linear(x, k_proj).unflatten(-1, (-1, d))  # k1 and k2 of each key/value head are neighbours
    value = linear(x, v_proj).unflatten(-1, (-1, 2 * d))
    angles = torch.outer(torch.arange(x.shape[1]).double(), inverse_frequencies.double())[:, None]
    cos, sin = ((attention_scaling * part).to(x.dtype) for part in (angles.cos(), angles.sin()))
    query, key = rotation(query, cos, sin), rotation(key, cos, sin)

    # The group of each query head, whether it is the group's noise, and the value and key that it reads: [H]
    heads, signals = query.shape[2], o_proj.shape[1] // (2 * d)
    groups = heads - signals
    group = torch.arange(heads) // (heads // groups)
    is_noise = torch.arange(heads) % (heads // groups) == heads // groups - 1
    value_index = group // (groups // value.shape[2])
    key_index = 2 * value_index + is_noise

    scores = torch.einsum("bihd,bjhd->bhij", query, key[:, :, key_index]) / math.sqrt(d)
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    softmaxes = scores.masked_fill(future, -math.inf).softmax(-1)  # [b, H, n, n]
    outputs = torch.einsum("bhij,bjhv->bihv", softmaxes, value[:, :, value_index])
    q1, k1, q2, k2 = lambdas
    scale = (q1 @ k1).exp() - (q2 @ k2).exp() + lambda_init
    difference = outputs[:, :, ~is_noise] - scale * outputs[:, :, is_noise][:, :, group[~is_noise]]
    normed = (1 - lambda_init) * rms_norm(difference, subln, eps)  # [b, n, s, 2d]
    return linear(normed.flatten(2), o_proj)


def motif_logits(
    input_ids: Tensor,
    weights: Mapping[str, Tensor],
    *,
    rms_norm_eps: float,
    attn_rms_norm_eps: float,
    inverse_frequencies: Tensor,
    attention_scaling: float = 1.0,
) -> Tensor:
    """Compute Motif 2's logits: [b, n] -> [b, n, vocabulary]. Without `lm_head.weight` the embedding is tied."""
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[input_ids]
    for i in range(sum(name.endswith("input_layernorm.weight") for name in weights)):

        def own(name: str, i: int = i) -> Tensor:
            return weights[f"model.layers.{i}.{name}"]

        x = x + attention(
            rms_norm(x, own("input_layernorm.weight"), rms_norm_eps),
            [own(f"self_attn.{name}_proj.weight") for name in "qkvo"],
            [own(f"self_attn.lambda_{name}") for name in ("q1", "k1", "q2", "k2")],
            own("self_attn.subln.weight"),
            lambda_init=0.8 - 0.6 * math.exp(-0.3 * (i - 1)),
            eps=attn_rms_norm_eps,
            rotation=rotate_halves,
            inverse_frequencies=inverse_frequencies,
            attention_scaling=attention_scaling,
        )
        normed = rms_norm(x, own("post_attention_layernorm.weight"), rms_norm_eps)
        gate = poly_norm(linear(normed, own("mlp.gate_proj.weight")), own("mlp.act_fn.weight"), own("mlp.act_fn.bias"))
        x = x + linear(gate * linear(normed, own("mlp.up_proj.weight")), own("mlp.down_proj.weight"))
    return linear(rms_norm(x, weights["model.norm.weight"], rms_norm_eps), weights.get("lm_head.weight", embedding))


def perdix_logits(
    input_ids: Tensor, weights: Mapping[str, Tensor], *, norm_eps: float, inverse_frequencies: Tensor
) -> Tensor:
    """Compute Perdix's logits: [b, n] -> [b, n, vocabulary]. Without `lm_head.weight` the embedding is tied."""
    embedding = weights["tok_emb.weight"]
    x = embedding[input_ids]
    for i in range(sum(name.endswith("attn_norm.weight") for name in weights)):

        def own(name: str, i: int = i) -> Tensor:
            return weights[f"blocks.{i}.{name}"]

        x = x + attention(
            rms_norm(x, own("attn_norm.weight"), norm_eps),
            [own(f"attn.w{name}.weight") for name in "qkvo"],
            [own(f"attn.lambda_{name}") for name in ("q1", "k1", "q2", "k2")],
            own("attn.subln.weight"),
            lambda_init=0.8 - 0.6 * math.exp(-0.3 * i),
            eps=norm_eps,
            rotation=rotate_neighbours,
            inverse_frequencies=inverse_frequencies,
        )
        up = linear(rms_norm(x, own("ffn_norm.weight"), norm_eps), own("ffn.up.weight"))
        activated = poly_norm(up, own("ffn.act.weight").flip(0), own("ffn.act.bias"))  # w0·n(x) + w1·n(x²) + w2·n(x³)
        x = x + linear(activated, own("ffn.down.weight"))
    return linear(rms_norm(x, weights["final_norm.weight"], norm_eps), weights.get("lm_head.weight", embedding))
