# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Supported dtypes; digests and checks of tensor values, a piece at a time."""

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch


DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The supported dtypes, by their names in safetensors files."""

PIECE = 1 << 18
"""The number of values in memory at a time when a tensor is read piece by piece."""


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Splits a tensor into contiguous pieces [m], m <= `PIECE`. A tensor without values has none."""
    values = tensor.detach().contiguous().reshape(-1)
    return (piece for piece in values.split(PIECE) if piece.numel())


def is_finite(piece: torch.Tensor) -> bool:
    """Whether a tensor with at least one value has neither NaN nor infinity."""
    return all(math.isfinite(value) for value in piece.aminmax())  # aminmax propagates NaN


def digest(values: Iterable[torch.Tensor]) -> str:
    """SHA-256 of a tensor's `pieces`. Equal values have equal digests in all dtypes but float64, which has its own."""
    sha256 = hashlib.sha256()
    for piece in values:
        sha256.update(data(piece.to(torch.promote_types(piece.dtype, torch.float32))))
    return sha256.hexdigest()


def data(piece: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor [m], not copied."""
    return piece.view(torch.uint8).numpy().data
