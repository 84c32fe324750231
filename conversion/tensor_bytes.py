# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The bytes of safetensors files, written a tensor at a time.

The safetensors library reads single tensors but writes only files whose tensors are all in memory, so the writer is
here. A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin and end of
its bytes), and the bytes of the tensors, one after another.
"""

import errno
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch


DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that are converted, by their names in safetensors files."""


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


def send(file: BinaryIO, begin: int, count: int, out: BinaryIO) -> int:
    """Appends `count` bytes of a file, or fewer, to an unbuffered file. Returns how many; 0 at the file's end."""
    if sys.platform == "linux":
        try:
            return os.sendfile(out.fileno(), file.fileno(), begin, count)  # within the kernel, as `shutil` does
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # not every file system can
                raise
    file.seek(begin)
    return out.write(file.read(min(count, 1 << 20)))


def write(tensor: torch.Tensor, out: BinaryIO) -> None:
    """Appends a tensor's bytes to an unbuffered file."""
    write_bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, out)


def write_bytes(rest: memoryview, out: BinaryIO) -> None:
    """Appends bytes to an unbuffered file, which may take only some of them at once."""
    while rest:
        rest = rest[out.write(rest) :]
