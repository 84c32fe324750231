# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, without importing torch, for the command line."""

import re
from typing import Literal, get_args


Variant = Literal["v1", "v2"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
VARIANTS, DTYPES = map(get_args, (Variant, DType))


def shard_size(max_shard_size: int | str) -> int | str:
    """Validate a number of bytes or a text like "5GB". Raises `ValueError` if it is neither."""
    size = re.fullmatch(r"(\d+)([KMGT]B)?", str(max_shard_size))
    if size is None or int(size[1]) == 0:
        raise ValueError(f"`max_shard_size` must be a number of bytes or a text like '5GB', got {max_shard_size!r}.")
    return size[0] if size[2] else int(size[1])
