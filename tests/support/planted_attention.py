"""Tiny models whose attention is planted by hand, so that every score is known."""

import math

import torch

from diffllama.evaluation.models import LoadedModel
from support.tiny_loaded_models import tiny_loaded_model


@torch.no_grad()
def planted_model(
    kind: str, markers: str = "0123456789", score: float = 60.0, second: float = 60.0, lambda_: float = 0.25
) -> LoadedModel:
    """A model in which every query scores the letters in `markers`, and all other keys 0, in every layer and head.

    Args:
        kind: as `tiny_loaded_model` takes it.
        markers: letters of one byte each.
        score: of a marker in the signals' maps of differential heads, and in all maps of a Llama.
        second: of a marker in the noises' maps.
        lambda_: what the noises' maps are subtracted with.

    The hidden states are the embeddings, [1, 1, 0, …] and of markers [1, 0, 1, …], in all layers: nothing is added to
    them. Nothing is rotated.
    """
    loaded = tiny_loaded_model(kind)
    model = loaded.model
    embeddings = model.get_input_embeddings().weight.zero_()
    embeddings[:, :2] = 1
    embeddings[loaded.encode(markers), 1:3] = torch.tensor([0.0, 1])
    normed = 1 / math.sqrt(2 / model.config.hidden_size + model.config.rms_norm_eps)  # of a 1 in the normed states
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
