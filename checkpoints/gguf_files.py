# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Metadata of GGUF files, and the parts of them that transformers ignores."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from diffllama.checkpoints.errors import CheckpointError, lines


if TYPE_CHECKING:
    from gguf import GGUFReader


def gguf_text(reader: "GGUFReader", key: str) -> str | None:
    """Return a string in the metadata of a GGUF file."""
    field = reader.fields.get(key)
    return bytes(field.parts[field.data[0]]).decode() if field else None


def gguf_number(reader: "GGUFReader", key: str) -> int | None:
    """Return an integer in the model's metadata of a GGUF file."""
    field = reader.fields.get(f"{gguf_text(reader, 'general.architecture')}.{key}")
    return int(field.parts[field.data[0]][0]) if field else None


def complete_gguf_config(
    config: PreTrainedConfig, reader: "GGUFReader", src: Path, tensor_names: Iterable[str]
) -> None:
    """Add fields that transformers does not read from a GGUF file to its configuration.

    Raises:
        CheckpointError: the file has parts that transformers, which reads `tensor_names`, would ignore.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = gguf_text(reader, "general.architecture")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (key_width := gguf_number(reader, "attention.key_length") or width) != width:
        config.head_dim = width = key_width

    faults = []
    if window := gguf_number(reader, "attention.sliding_window"):  # 0: none
        if config.model_type == "phi3":
            config.sliding_window = window
        else:
            faults.append(f"{arch}.attention.sliding_window {window}")
    if (scaling := gguf_text(reader, f"{arch}.rope.scaling.type")) not in (None, "none"):
        faults.append(f"{arch}.rope.scaling.type {scaling!r}")
    if (rotated := gguf_number(reader, "rope.dimension_count") or width) != width:
        faults.append(f"{arch}.rope.dimension_count {rotated} of {width}")
    archs = {name: member for member, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(archs[arch], config.num_hidden_layers)
    known = {names.get_name(name, (".weight", ".bias")) for name in tensor_names}
    faults += [f"tensor {tensor.name}" for tensor in reader.tensors if tensor.name not in known]
    if faults:
        what = f"transformers does not read these parts of {src}; convert the original weights instead"
        raise CheckpointError(lines(what, faults))
