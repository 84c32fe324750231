# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Safetensors shards and their index."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.options import shard_size
from diffllama.checkpoints.reading import Checkpoint, combine, nonfinite_tensors
from diffllama.checkpoints.tensor_bytes import digest, file_header, pieces, write_bytes


Progress = Callable[[int, int], None]
"""Is called with the number of bytes written and their total."""


@dataclass(frozen=True)
class Step:
    """How one tensor of the result is made.

    Attributes:
        inputs: names of the source's tensors that it needs; empty for a new tensor.
        make: the tensor from `inputs`.
        result: its shape and dtype, on the meta device.
        copied: whether it is its only input as it is.
    """

    inputs: tuple[str, ...]
    make: Callable[..., torch.Tensor]
    result: torch.Tensor
    copied: bool = False


def write_shards(
    folder: Path,
    steps: Mapping[str, Step],
    checkpoint: Checkpoint,
    max_shard_size: int | str = "5GB",
    stem: str = "model",
    progress: Progress | None = None,
) -> str:
    """Carries out a plan, with one tensor in memory at a time.

    Args:
        folder: where `{stem}.safetensors` is written, or shards and their index, named as transformers names them.
        steps: the plan, see `weight_map.plan`.
        checkpoint: where the steps' inputs come from.
        max_shard_size: bytes, or a text like "5GB"; a larger tensor gets a shard of its own.
        progress: see `Progress`.

    Returns:
        The `fingerprint` of what was written.

    Raises:
        CheckpointError: values of the source are NaN or infinite, or a tensor's become so.
    """
    results = {name: step.result for name, step in steps.items()}
    split = split_torch_state_dict_into_shards(
        results,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=shard_size(max_shard_size),
    )
    digests = {}
    total, done = sum(tensor.nbytes for tensor in results.values()), 0
    for filename, names in split.filename_to_tensors.items():
        # Wide dtypes first, so that every tensor begins at a multiple of its elements' size
        names = sorted(names, key=lambda name: -results[name].element_size())
        with (folder / filename).open("wb", buffering=0) as out:
            write_bytes(memoryview(file_header({name: results[name] for name in names})), out)
            for name in names:
                step = steps[name]
                digests[name] = step.result.shape, write_tensor(name, step, checkpoint, out)
                done += step.result.nbytes
                if progress is not None:
                    progress(done, total)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return combine(digests)


def write_tensor(name: str, step: Step, checkpoint: Checkpoint, out: BinaryIO) -> str:
    """Appends a tensor's bytes to an unbuffered file. Returns its `digest`; see `write_shards`."""
    inputs = step.inputs
    made = checkpoint.pieces(inputs[0]) if step.copied else pieces(step.make(*map(checkpoint.read, inputs)))
    digested, finite = digest(made, out)
    if finite:
        return digested
    if bad := nonfinite_tensors(checkpoint):
        items = [f"{file}: {tensor}" for tensor, file in bad.items()]
        raise CheckpointError(
            lines("Weights that are NaN or infinite: the file is damaged or its training failed", items)
        )
    dtype = str(step.result.dtype).removeprefix("torch.")
    raise CheckpointError(
        f"{name} becomes infinite: {dtype} holds numbers up to {torch.finfo(step.result.dtype).max:.5g}, and what is "
        f"made of {', '.join(inputs)} is larger. Choose a wider dtype, such as bfloat16."
    )
