# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the README's figure: the two softmax maps of one differential head and their difference.

The two maps of the demo's converted model stay identical until you train it. To show a difference without a trained
checkpoint, this program halves the second query of each head, which flattens its map.

Usage: python examples/draw_maps.py [MODEL_FOLDER] [PICTURE]
"""

import sys

import matplotlib


matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from transformers import AutoTokenizer

from diffllama import DiffLlamaForCausalLM


TEXT = "The magic number of Paris is 4173. The magic number of Rome is 2985. The magic number of Paris is"
LAYER, HEAD = 18, 6


def spread_second_maps(model: DiffLlamaForCausalLM) -> None:
    """Halve the second query of every head in place: its scores shrink, and its softmax map becomes more uniform."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.weight.unflatten(0, (-1, 2, attention.head_dim))[:, 1] *= 0.5


def main(folder: str = "demo/SmolLM2-135M-Instruct-Diff", picture: str = "docs/maps.png") -> None:
    """Compute the maps of one head and write the picture."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = DiffLlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")  # only eager returns maps
    spread_second_maps(model)
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        difference = model(**inputs, output_attentions=True).attentions[LAYER][0, HEAD]
        softmax_maps = model(**inputs, output_attentions=True, output_softmax_maps=True).attentions[LAYER][0]
    first, second = softmax_maps[2 * HEAD : 2 * HEAD + 2]

    labels = [tokenizer.decode(token) for token in inputs.input_ids[0]]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.1), sharey=True, layout="constrained")
    titles = ("first map  A₁", "second map  A₂", "differential map  A₁ − λA₂")
    for axis, values, title in zip(axes, (first, second, difference), titles, strict=True):
        # the first token takes most of the attention: colours are for the others
        limit = values[1:, 1:].abs().max()
        image = axis.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(title)
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6)
        axis.set_yticks(range(len(labels)), labels, fontsize=6)
        figure.colorbar(image, ax=axis, shrink=0.7)
    figure.suptitle(f"SmolLM2-135M as DIFF V2, second queries halved: layer {LAYER}, head {HEAD}", fontsize=10)
    figure.savefig(picture, dpi=110)
    print(f"Wrote {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
