# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Pickled state dicts, read without running any code in them."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from diffllama.checkpoints.tensor_values import DTYPES


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a pickled state dict without running any code in it.

    Nested dictionaries and lists are flattened, with names joined by dots. If the file has a state dict under `model`
    or `state_dict`, only that is read.

    Raises:
        ValueError: the file contains anything else than floating-point tensors, is truncated, or would run code.
    """
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\3\4"  # torch before 1.6 wrote no zip files; they cannot be memory-mapped
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        content = f"contains {match[1]}" if match else "is not a pickle of tensors"
        raise ValueError(f"{content}; only tensors are loaded, because unpickling can execute code") from error
    except Exception as error:  # torch raises many classes for damaged pickles
        reason = " ".join((type(error).__name__, *str(error).split()))
        raise ValueError(f"torch cannot load it; it may be truncated: {reason}") from error
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors: dict[str, torch.Tensor] = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                collect(item, f"{name}.{key}" if name else str(key))
        elif not isinstance(value, torch.Tensor) or value.dtype not in DTYPES.values():
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{name or 'it'} is {kind}, not a tensor of floating-point numbers ({', '.join(DTYPES)})")
        elif value.layout != torch.strided or value.is_nested or value.is_meta:
            what = "nested" if value.is_nested else "without values" if value.is_meta else str(value.layout)
            raise ValueError(f"{name or 'it'} is {what}, not a dense tensor")
        elif name in tensors:
            raise ValueError(f"two tensors have the name {name}")
        else:
            tensors[name] = value.detach()

    collect(content, "")
    return tensors
