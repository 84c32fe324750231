"""Tiny models whose weights are set by hand, so that every attention score is known."""

import math

import torch

from diffllama.evaluation.models import LoadedModel
from support.tiny_loaded_models import tiny_loaded_model


@torch.no_grad()
def planted_model(
    kind: str, markers: str = "0123456789", score: float = 60.0, second: float = 60.0, lambda_: float = 0.25
) -> LoadedModel:
    """Return a model with a fixed attention score for the letters in `markers`, and 0 for all other keys.

    All layers, heads and queries have the same scores. Hidden states are the embeddings in all layers: [1, 1, 0, …],
    and [1, 0, 1, …] for markers. No layer adds to them, and RoPE rotates nothing.

    Args:
        kind: kind of `tiny_loaded_model`.
        markers: letters of one byte each.
        score: score of a marker in the signal maps of differential heads, and in all maps of a Llama.
        second: score of a marker in the noise maps.
        lambda_: λ of all heads.
    """
    loaded = tiny_loaded_model(kind)
    model = loaded.model
    embeddings = model.get_input_embeddings().weight.zero_()
    embeddings[:, :2] = 1
    embeddings[loaded.encode(markers), 1:3] = torch.tensor([0.0, 1])
    normed = 1 / math.sqrt(2 / model.config.hidden_size + model.config.rms_norm_eps)  # a 1 after the norm
    model.model.rotary_emb.inv_freq.zero_()
    for layer in model.model.layers:
        attention = layer.self_attn
        for module in (attention.q_proj, attention.k_proj, attention.o_proj, layer.mlp.down_proj):
            module.weight.zero_()
        width = attention.map_dim if kind == "v1" else attention.head_dim
        queries = attention.q_proj.weight.unflatten(0, (-1, width))  # [maps, width, hidden size]
        queries[:, 0, 0] = score / (normed**2 * attention.scaling)
        if kind != "llama":
            r = attention.signals_per_noise
            queries[r :: r + 1, 0, 0] = second / (normed**2 * attention.scaling)
        attention.k_proj.weight.unflatten(0, (-1, width))[:, 0, 2] = 1
        if kind == "v1":
            attention.lambda_q1.zero_()
            attention.lambda_q2.zero_()
            attention.lambda_init = lambda_
        if kind == "v2":
            attention.lambda_proj.weight.zero_()[:, 0] = math.log(lambda_ / (1 - lambda_)) / normed
    return loaded
