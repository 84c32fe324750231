# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The bytes of safetensors files, written a tensor at a time.

The safetensors library reads single tensors but writes only files whose tensors are all in memory, so the writer is
here. A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin and end of
its bytes), and the bytes of the tensors, one after another.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import torch


DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that are converted, by their names in safetensors files."""

PIECE = 1 << 18
"""How many values are in memory at a time of a tensor that is read piece by piece."""


def file_header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """What a safetensors file of these tensors, in this order, begins with."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of a tensor, one after another: [m] with m <= `PIECE`; none of a tensor without values."""
    values = tensor.detach().contiguous().reshape(-1)
    return (piece for piece in values.split(PIECE) if piece.numel())


def is_finite(piece: torch.Tensor) -> bool:
    """Whether all values of a tensor, which has some, are numbers, neither NaN nor infinite."""
    return all(math.isfinite(value) for value in piece.aminmax())  # NaN is the least and the largest of all


def digest(values: Iterable[torch.Tensor], out: BinaryIO | None = None) -> tuple[str, bool]:
    """SHA-256 of a tensor's values, whatever dtype stores them, and whether all of them are finite.

    Args:
        values: the tensor's `pieces`.
        out: an unbuffered file to which their bytes are appended.
    """
    sha256, finite = hashlib.sha256(), True
    for piece in values:
        finite = finite and is_finite(piece)
        wide = torch.promote_types(piece.dtype, torch.float32)  # equal values have one digest in all dtypes but float64
        sha256.update(data(piece.to(wide)))
        if out is not None:
            write_bytes(data(piece), out)
    return sha256.hexdigest(), finite


def data(piece: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor [m], not copied."""
    return piece.view(torch.uint8).numpy().data


def write_bytes(rest: memoryview, out: BinaryIO) -> None:
    """Appends bytes to an unbuffered file, which may take only some of them at once."""
    while rest:
        rest = rest[out.write(rest) :]
