# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Model cards, filled from facts that a model itself tells."""

from importlib import resources
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData


if TYPE_CHECKING:
    from diffllama.modeling_diff.modeling_diffllama import DiffLlamaForCausalLM


def converted_card(model: "DiffLlamaForCausalLM", tokenizer: Any, source: str) -> ModelCard:
    """The card of a model converted from another one.

    Args:
        model: the converted model.
        tokenizer: its tokenizer, or `None`.
        source: what it was converted from, a key of `diffllama.conversion.SOURCES`.
    """
    config = model.config
    return ModelCard.from_template(
        ModelCardData(
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["diffllama", "differential-attention", f"diff-{config.diff_variant}"],
        ),
        template_str=resources.files(__name__).joinpath("converted.md").read_text(encoding="utf-8"),
        source=source,
        config=config,
        heads=config.num_attention_heads // 2,
        parameters=f"{model.num_parameters():,}",
        chat=bool(getattr(tokenizer, "chat_template", None)),
    )


__all__ = ["converted_card"]
