"""The independent reference: a differential Llama from the paper's formulas, head by head, in plain PyTorch.

Only the names of weights come from the package. Every function computes in the dtype of its inputs: float64 is the
truth, bfloat16 shows the error of plain PyTorch. Shapes are those of one sequence, without a batch.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Apply half-rotation RoPE to [n, w]: rotate (x_i, x_{i+w/2}) by positions·θ^(-2i/w)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.to(torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[:, :half], x[:, half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute x / √(mean(x²) + ε), times a weight."""
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def softmax_map(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """Compute softmax(Q Kᵀ/√w) over visible keys: [n, w], [m, w], [n, m] -> [n, m]. A row without any is zero."""
    scores = (query @ key.T / math.sqrt(query.shape[-1])).masked_fill(~visible, -math.inf)
    return torch.where(visible.any(-1, keepdim=True), torch.softmax(scores, dim=-1), torch.zeros_like(scores))


def lambda_init(layer: int) -> float:
    """Compute the paper's schedule for layer l = 1, 2, …: 0.8 - 0.6·exp(-0.3·(l - 1))."""
    return 0.8 - 0.6 * math.exp(-0.3 * ((layer + 1) - 1))


def linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Compute x Wᵀ, plus a bias if there is one."""
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
    noise_heads: int | None = None,
    theta: float | None = 10000.0,
    window: int | None = None,
    norm_eps: float = 1e-6,
    head_norm_eps: float = 1e-5,
    lambda_start: float | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Compute multi-head differential attention of one sequence.

    As many heads share a noise query as there are heads for each of the `noise_heads` (by default, one): their queries
    come first, then the noise's. Queries and keys are normalized if there are weights for it, and rotated unless
    `theta` is `None`. With a window, a token sees only the last `window` of what is visible to it, itself among them.
    λ_init is the paper's unless `lambda_start` is given.

    Returns the output [n, hidden], for each head its differential map, and for each query its softmax map [n, n].
    """
    noise_heads = noise_heads or heads
    group = heads // noise_heads  # r
    width = weights["v_proj.weight"].shape[0] // key_value_heads  # D
    d = width // 2 if variant == "v1" else width
    start = lambda_init(layer) if lambda_start is None else lambda_start
    if window is not None:
        visible = visible & torch.ones_like(visible).triu(1 - window)
    q, k, v = (linear(x, weights, f"{name}_proj") for name in "qkv")

    def prepared(vectors: Tensor, index: int, norm: str) -> Tensor:
        """Return query or key number `index`, [n, d], normalized and rotated."""
        vector = vectors[:, index * d : (index + 1) * d]
        if f"{norm}.weight" in weights:
            vector = rms_norm(vector, weights[f"{norm}.weight"], norm_eps)
        return vector if theta is None else rotate(vector, positions, theta)

    outputs, differential, softmaxes = [], [], []
    for i in range(heads):
        j = i // (heads // key_value_heads)  # key/value head of this head
        value = v[:, j * width : (j + 1) * width]
        first_query = i // group * (group + 1)  # first query of this head's group
        query, noise_query = (prepared(q, first_query + at, "q_norm") for at in (i % group, group))
        if variant == "v1":
            key, noise_key = (prepared(k, 2 * j + half, "k_norm") for half in (0, 1))
            dot1 = (weights["lambda_q1"] * weights["lambda_k1"]).sum()
            dot2 = (weights["lambda_q2"] * weights["lambda_k2"]).sum()
            lam: Tensor = torch.exp(dot1) - torch.exp(dot2) + start
        else:
            key = noise_key = prepared(k, j, "k_norm")
            lam = torch.sigmoid(x @ weights["lambda_proj.weight"][i])[:, None]
        signal, noise = softmax_map(query, key, visible), softmax_map(noise_query, noise_key, visible)
        output = (signal - lam * noise) @ value
        if variant == "v1":
            output = rms_norm(output, weights["head_norm.weight"], head_norm_eps) * (1 - start)
        outputs.append(output)
        differential.append(signal - lam * noise)
        softmaxes += [signal] + [noise] * (i % group == group - 1)
    return linear(torch.cat(outputs, dim=-1), weights, "o_proj"), differential, softmaxes


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute w0·n(x³) + w1·n(x²) + w2·n(x) + b, where n is RMSNorm with ε = 1e-6 (arXiv 2411.03884)."""
    return sum((w * rms_norm(x**power, None, 1e-6) for w, power in zip(weight, (3, 2, 1), strict=True)), bias)


def feed_forward(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Compute down(act(gate(x))·up(x)), without a gate down(act(up(x))); SiLU, or PolyNorm if it has weights."""
    up = linear(x, weights, "up_proj")
    gate = linear(x, weights, "gate_proj") if "gate_proj.weight" in weights else up
    if "act_fn.weight" in weights:
        active = poly_norm(gate, weights["act_fn.weight"], weights["act_fn.bias"])
    else:
        active = gate * torch.sigmoid(gate)
    return linear(active if gate is up else active * up, weights, "down_proj")


def joined_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    differential_lambda: Tensor,
    mask: Tensor | None,
    scaling: float,
    signals_per_noise: int = 1,
) -> Tensor:
    """Compute differential attention from the arguments of attention functions, by whole maps.

    Queries [b, H, n, D] in groups of `signals_per_noise` signals and their noise, keys and values [b, h_kv, m, D], λ
    [1] or [b, n, s, 1], a boolean mask that fits [b, H, n, m] or `None` for causal -> signal - λ·noise [b, n, s, D].
    """
    repeats, n, m = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    visible = torch.ones(n, m, dtype=torch.bool).tril(m - n) if mask is None else mask
    maps = (query @ key.mT * scaling).masked_fill(~visible, -math.inf).softmax(-1)
    outputs = (maps @ value).transpose(1, 2)
    noise = torch.arange(outputs.shape[2]) % (signals_per_noise + 1) == signals_per_noise
    return outputs[:, :, ~noise] - differential_lambda * outputs[:, :, noise].repeat_interleave(signals_per_noise, 2)


def under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights whose names start with `prefix`, without the prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}


def language_model(
    input_ids: Tensor, weights: Mapping[str, Tensor], positions: Tensor, visible: Tensor, config: object
) -> Tensor:
    """Compute the logits [n, vocabulary] of one sequence, with pre-norm layers as in Llama."""
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
                heads=config.num_attention_heads - config.num_noise_heads,
                key_value_heads=config.num_key_value_heads,
                noise_heads=config.num_noise_heads,
                theta=config.rope_parameters["rope_theta"] if (config.no_rope_layers or {i: 1})[i] else None,
                window=config.sliding_window if config.layer_types[i] == "sliding_attention" else None,
                norm_eps=eps,
                head_norm_eps=config.head_norm_eps,
                lambda_start=config.lambda_init[i] if isinstance(config.lambda_init, list) else None,
            )[0]
        )
        y = rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        x = x + feed_forward(y, under(layer, "mlp."))
    return rms_norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
