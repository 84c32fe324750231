# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the README's figure: the two softmax maps of one differential head and their difference.

The model is examples/recall_model, a small V1 that was trained to find needles, `[ key value]`, in text. The text ends
with a key, and the head drawn is the one that gives its needle, framed in the last row, the most attention.

Usage: python examples/draw_maps.py [MODEL_FOLDER] [PICTURE]
"""

import sys

import matplotlib


matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle
from transformers import AutoTokenizer

from diffllama import DiffLlamaForCausalLM


TEXT = (
    "The evening was still, and they[ London sister] walked home by the old road, for[ morning letter] there was no "
    "light[ window brother] and nothing[ father money] was said.[ morning letter][ London"
)


def main(folder: str = "examples/recall_model", picture: str = "docs/maps.png") -> None:
    """Compute the maps of one head and write the picture."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = DiffLlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")  # returns maps
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    tokens = ids[0].tolist()
    needle = tokens.index(tokens[-1]) - 1  # the key's first occurrence is in its needle, after the bracket
    with torch.no_grad():
        outputs = model(ids, output_attentions=True)
        softmax_maps = model(ids, output_attentions=True, output_softmax_maps=True).attentions
    attention = torch.stack(outputs.attentions)[:, 0]  # [layers, heads, n, n]
    layer, head = divmod(int(attention[:, :, -1, needle : needle + 4].sum(-1).argmax()), attention.shape[1])
    first, second = softmax_maps[layer][0, 2 * head : 2 * head + 2]

    labels = [tokenizer.decode(token) for token in tokens]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), sharey=True, layout="constrained")
    titles = ("first map  A₁", "second map  A₂", "differential map  A₁ − λA₂")
    for axis, values, title in zip(axes, (first, second, attention[layer, head]), titles, strict=True):
        image = axis.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
        axis.set_title(title)
        axis.set_xlabel("attended token")
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5)
        axis.set_yticks(range(len(labels)), labels, fontsize=5)
        for row, column in (values < -0.05).nonzero().tolist():  # so that signs can be told apart in grey
            axis.text(column, row, "−", ha="center", va="center", fontsize=5)
        axis.add_patch(Rectangle((needle - 0.5, len(tokens) - 1.5), 4, 1, fill=False, clip_on=False))
    axes[0].set_ylabel("token that attends")
    figure.colorbar(image, ax=axes, shrink=0.8, label="attention weight; “−” below −0.05")
    found = tokenizer.decode(outputs.logits[0, -1].argmax())
    where = f"V1 recall model, layer {layer}, head {head}"
    figure.suptitle(f"{where}; after “{labels[-1]}” it predicts “{found}”", fontsize=10)
    figure.savefig(picture, dpi=110)
    print(f"Wrote {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
