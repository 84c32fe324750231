# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Values of tensors, looked at a piece at a time: which dtypes there are, digests, NaN and infinity."""

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch


DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that are converted, by their names in safetensors files."""

PIECE = 1 << 18
"""How many values of a tensor are in memory at a time when it is read piece by piece."""


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of a tensor, one after another: [m] with m <= `PIECE`; none of a tensor without values."""
    values = tensor.detach().contiguous().reshape(-1)
    return (piece for piece in values.split(PIECE) if piece.numel())


def is_finite(piece: torch.Tensor) -> bool:
    """Whether all values of a tensor, which has some, are numbers, neither NaN nor infinite."""
    return all(math.isfinite(value) for value in piece.aminmax())  # NaN is the least and the largest of all


def digest(values: Iterable[torch.Tensor]) -> str:
    """SHA-256 of a tensor's `pieces`. Equal values have equal digests in all dtypes but float64, which has its own."""
    sha256 = hashlib.sha256()
    for piece in values:
        sha256.update(data(piece.to(torch.promote_types(piece.dtype, torch.float32))))
    return sha256.hexdigest()


def data(piece: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor [m], not copied."""
    return piece.view(torch.uint8).numpy().data
