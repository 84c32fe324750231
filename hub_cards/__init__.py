# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Model cards, filled from facts that a model itself tells."""

from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData


if TYPE_CHECKING:
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


def converted_card(
    config: "DiffLlamaConfig", record: Mapping[str, Any], parameters: int, *, chat: bool = False, part: bool = False
) -> ModelCard:
    """The card of a model converted from another one, or of one of ours converted into another.

    Args:
        config: our configuration, before or after.
        record: what conversion.json holds, see `diffllama.conversion.convert`.
        parameters: how many numbers the weights have.
        chat: whether the tokenizer has a chat template.
        part: whether it is attention modules alone.
    """
    result, source = record["result"], record["source"]
    loads = not part and not result["format"].startswith("unilm")
    return ModelCard.from_template(
        ModelCardData(
            library_name="transformers" if loads else None,
            pipeline_tag="text-generation" if loads else None,
            tags=["diffllama", "differential-attention", f"diff-{config.diff_variant}"],
            base_model=source["name"] if "revision" in source else None,
        ),
        template_str=resources.files(__name__).joinpath("converted.md").read_text(encoding="utf-8"),
        record=record,
        ours=result["format"] == config.model_type,
        part=part,
        config=config,
        heads=config.num_attention_heads // 2,
        parameters=f"{parameters:,}",
        chat=chat,
    )


__all__ = ["converted_card"]
