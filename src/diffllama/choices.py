# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What options can be, here so that the command line need not import torch to know."""

import re
from typing import Literal, get_args


Source = Literal["llama", "transformers", "unilm-v1", "unilm-v2"]
"""What can become ours: models of Llama's layout, transformers' own `diffllama`, microsoft/unilm's modules."""

Target = Literal["transformers", "unilm-v1", "unilm-v2"]
"""What ours can become: `transformers` and `unilm-v1` if it is V1, `unilm-v2` if it is V2."""

Variant = Literal["v1", "v2"]
Pairing = Literal["flash", "plain"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

SOURCES, TARGETS, VARIANTS, PAIRINGS, DTYPES = map(get_args, (Source, Target, Variant, Pairing, DType))


def check_conversion(source: str | None, target: str | None, variant: str | None, pairing: str | None) -> None:
    """Raises `ValueError` if there is no conversion that these arguments of `convert` name."""
    if (source is None) == (target is None):
        raise ValueError(f"Give `source` (one of {', '.join(SOURCES)}) or `target` (one of {', '.join(TARGETS)}).")
    if source is not None and source not in SOURCES:
        raise ValueError(f"Unknown source {source!r}. Known: {', '.join(SOURCES)}.")
    if target is not None and target not in TARGETS:
        raise ValueError(
            f"A differential model cannot become {target!r}, which does not compute a difference of two softmax maps. "
            f"Known targets: {', '.join(TARGETS)} (transformers' diffllama is V1; V2 has no stock target)."
        )
    for option, value, known, owner in (
        ("variant", variant, VARIANTS, "llama"),
        ("pairing", pairing, PAIRINGS, "unilm-v1"),
    ):
        if value is not None and (value not in known or source != owner):
            raise ValueError(
                f"`{option}` is one of {', '.join(known)} and goes with source={owner!r}, got {value!r} with "
                f"{source or target!r}."
            )


def shard_size(max_shard_size: int | str) -> int | str:
    """A number of bytes, or a text like "5GB". Raises `ValueError` if it is neither."""
    size = re.fullmatch(r"(\d+)([KMGT]B)?", str(max_shard_size))
    if size is None or int(size[1]) == 0:
        raise ValueError(f"`max_shard_size` must be a number of bytes or a text like '5GB', got {max_shard_size!r}.")
    return size[0] if size[2] else int(size[1])
