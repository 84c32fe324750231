# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The arguments of `convert`, without importing torch, for the command line."""

from typing import Literal, get_args

from diffllama.checkpoints.options import VARIANTS


Source = Literal["llama", "transformers", "unilm-v1", "unilm-v2", "motif", "perdix"]
"""Source formats: models of Llama's layout, transformers' own `diffllama`, microsoft/unilm's modules, Motif 2 and
Perdix."""

Target = Literal["transformers", "unilm-v1", "unilm-v2", "motif"]
"""Target formats: `unilm-v2` for V2, the others for V1."""

GqaLayout = Literal["grouped", "repeated"]

SOURCES, TARGETS, GQA_LAYOUTS = map(get_args, (Source, Target, GqaLayout))


def check_conversion(
    source: str | None, target: str | None, variant: str | None, gqa_layout: str | None, noise_heads: int | None
) -> None:
    """Raise `ValueError` if no conversion exists for these arguments of `convert`."""
    if (source is None) == (target is None):
        both = "" if source is None else f", not both, got {source!r} and {target!r}"
        raise ValueError(
            f"Give `source` (one of {', '.join(SOURCES)}) or `target` (one of {', '.join(TARGETS)}){both}."
        )
    if source is not None and source not in SOURCES:
        raise ValueError(f"Unknown source {source!r}. Known: {', '.join(SOURCES)}.")
    if target is not None and target not in TARGETS:
        raise ValueError(
            f"A differential model cannot be converted to {target!r}. "
            f"Known targets: {', '.join(TARGETS)} (transformers' diffllama is V1 only)."
        )
    for option, value, known, owner in (
        ("variant", variant, VARIANTS, "llama"),
        ("gqa_layout", gqa_layout, GQA_LAYOUTS, "unilm-v1"),
    ):
        if value is not None and (value not in known or source != owner):
            raise ValueError(
                f"`{option}` must be one of {', '.join(known)} and needs source={owner!r}, got {value!r} with "
                f"{source or target!r}."
            )
    if noise_heads is not None and source != "llama":
        raise ValueError(f"`noise_heads` needs source='llama', got {noise_heads} with {source or target!r}.")
