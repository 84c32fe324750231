"""The independent truth: a differential Llama written from the paper's formulas, head by head, in plain PyTorch.

Nothing here comes from the package but the names of the weights. Every function works in the dtype of its inputs:
float64 is the truth, bfloat16 shows what plain PyTorch loses. Shapes are those of one sequence, without a batch.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Half-rotation RoPE of [n, w]: (x_i, x_{i+w/2}) turns by positions·θ^(-2i/w)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.to(torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[:, :half], x[:, half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / √(mean(x²) + ε), times a weight."""
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def softmax_map(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """softmax(Q Kᵀ/√w) over the visible keys: [n, w], [m, w], [n, m] -> [n, m]; a row that sees nothing is zero."""
    scores = (query @ key.T / math.sqrt(query.shape[-1])).masked_fill(~visible, -math.inf)
    return torch.where(visible.any(-1, keepdim=True), torch.softmax(scores, dim=-1), torch.zeros_like(scores))


def lambda_init(layer: int) -> float:
    """The paper's schedule, layers counted from 1: 0.8 - 0.6·exp(-0.3·(l - 1))."""
    return 0.8 - 0.6 * math.exp(-0.3 * ((layer + 1) - 1))


def linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """x Wᵀ, plus a bias if there is one."""
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    positions: Tensor,
    visible: Tensor,
    *,
    variant: str,
    layer: int,
    heads: int,
    key_value_heads: int,
    theta: float | None = 10000.0,
    window: int | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Multi-head differential attention of one sequence.

    Queries and keys are normalised if there are weights for it, and rotated unless `theta` is `None`. With a window, a
    token sees only the last `window` of what is visible to it, itself among them.

    Returns the output [n, hidden], and for each head its differential map and its two softmax maps [n, n].
    """
    width = weights["v_proj.weight"].shape[0] // key_value_heads  # D
    d = width // 2
    if window is not None:
        visible = visible & torch.ones_like(visible).triu(1 - window)
    q, k, v = (linear(x, weights, f"{name}_proj") for name in "qkv")
    outputs, differential, softmaxes = [], [], []
    for i in range(heads):
        j = i // (heads // key_value_heads)  # the key/value head that this head reads
        value = v[:, j * width : (j + 1) * width]
        if variant == "v1":
            q_i, k_j = q[:, i * width : (i + 1) * width], k[:, j * width : (j + 1) * width]
            q1, q2, k1, k2 = q_i[:, :d], q_i[:, d:], k_j[:, :d], k_j[:, d:]
            dot1 = (weights["lambda_q1"] * weights["lambda_k1"]).sum()
            dot2 = (weights["lambda_q2"] * weights["lambda_k2"]).sum()
            lam: Tensor = torch.exp(dot1) - torch.exp(dot2) + lambda_init(layer)
        else:
            q1, q2 = q[:, 2 * i * width : (2 * i + 1) * width], q[:, (2 * i + 1) * width : (2 * i + 2) * width]
            k1 = k2 = k[:, j * width : (j + 1) * width]
            lam = torch.sigmoid(x @ weights["lambda_proj.weight"][i])[:, None]
        if "q_norm.weight" in weights:
            q1, q2 = (rms_norm(query, weights["q_norm.weight"], norm_eps) for query in (q1, q2))
            k1, k2 = (rms_norm(key, weights["k_norm.weight"], norm_eps) for key in (k1, k2))
        if theta is not None:
            q1, q2, k1, k2 = (rotate(vectors, positions, theta) for vectors in (q1, q2, k1, k2))
        map1, map2 = softmax_map(q1, k1, visible), softmax_map(q2, k2, visible)
        output = (map1 - lam * map2) @ value
        if variant == "v1":
            output = rms_norm(output, weights["head_norm.weight"], 1e-5) * (1 - lambda_init(layer))
        outputs.append(output)
        differential.append(map1 - lam * map2)
        softmaxes += [map1, map2]
    return linear(torch.cat(outputs, dim=-1), weights, "o_proj"), differential, softmaxes


def joined_attention(
    query: Tensor, key: Tensor, value: Tensor, differential_lambda: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Differential attention of what attention functions are given, by whole maps.

    Queries [b, 2h, n, D], keys and values [b, h_kv, m, D], λ [1] or [b, n, h, 1], a boolean mask that fits
    [b, 2h, n, m] or `None` for causal -> O1 - λ·O2 [b, n, h, D].
    """
    repeats, n, m = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    visible = torch.ones(n, m, dtype=torch.bool).tril(m - n) if mask is None else mask
    maps = (query @ key.mT * scaling).masked_fill(~visible, -math.inf).softmax(-1)
    first, second = (maps @ value).transpose(1, 2).unflatten(2, (-1, 2)).unbind(3)
    return first - differential_lambda * second


def under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names start with `prefix`, without it."""
    return {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}


def language_model(
    input_ids: Tensor, weights: Mapping[str, Tensor], positions: Tensor, visible: Tensor, config: object
) -> Tensor:
    """Logits [n, vocabulary] of one sequence: pre-norm layers of attention and SwiGLU, as in Llama."""
    eps = config.rms_norm_eps
    x = weights["model.embed_tokens.weight"][input_ids]
    for i in range(config.num_hidden_layers):
        layer = under(weights, f"model.layers.{i}.")
        x = (
            x
            + attention(
                rms_norm(x, layer["input_layernorm.weight"], eps),
                under(layer, "self_attn."),
                positions,
                visible,
                variant=config.diff_variant,
                layer=i,
                heads=config.num_attention_heads // 2,
                key_value_heads=config.num_key_value_heads,
                theta=config.rope_parameters["rope_theta"] if (config.no_rope_layers or {i: 1})[i] else None,
                window=config.sliding_window if config.layer_types[i] == "sliding_attention" else None,
                norm_eps=eps,
            )[0]
        )
        y = rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        gate = linear(y, layer, "mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(y, layer, "mlp.up_proj"), layer, "mlp.down_proj")
    return rms_norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
