# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Supported dtypes; digests and checks of tensor values, in pieces."""

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch


DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Name in safetensors files -> supported dtype."""

PIECE = 1 << 18
"""Number of values in a piece of a tensor."""


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a tensor into contiguous pieces [m], m <= `PIECE`. An empty tensor has none."""
    values = tensor.detach().contiguous().reshape(-1)
    return (piece for piece in values.split(PIECE) if piece.numel())


def is_finite(piece: torch.Tensor) -> bool:
    """Whether a tensor with at least one value has neither NaN nor infinity."""
    return all(math.isfinite(value) for value in piece.aminmax())  # aminmax propagates NaN


def digest(values: Iterable[torch.Tensor]) -> str:
    """Compute the SHA-256 of a tensor's `pieces`. Equal values have equal digests in all dtypes but float64."""
    sha256 = hashlib.sha256()
    for piece in values:
        sha256.update(data(piece.to(torch.promote_types(piece.dtype, torch.float32))))
    return sha256.hexdigest()


def data(piece: torch.Tensor) -> memoryview:
    """View the bytes of a contiguous tensor [m] without a copy."""
    return piece.view(torch.uint8).numpy().data
