# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors shards and their index."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.json_files import write_json
from diffllama.checkpoints.options import shard_size
from diffllama.checkpoints.reading import Checkpoint, combine, nonfinite_tensors
from diffllama.checkpoints.tensor_values import digest, is_finite, pieces


Progress = Callable[[int, int], None]
"""Function of the number of bytes written and their total."""


@dataclass(frozen=True)
class Step:
    """Computation of one tensor of the result.

    Attributes:
        inputs: names of the source's tensors that it reads; empty for a new tensor.
        make: computes the tensor from `inputs`.
        result: shape and dtype of the tensor, on the meta device.
    """

    inputs: tuple[str, ...]
    make: Callable[..., torch.Tensor]
    result: torch.Tensor


def write_shards(
    folder: Path,
    steps: Mapping[str, Step],
    checkpoint: Checkpoint,
    max_shard_size: int | str = "5GB",
    stem: str = "model",
    progress: Progress | None = None,
) -> str:
    """Write the tensors of a plan, with one shard and one tensor of the source in memory at a time.

    Args:
        folder: receives `{stem}.safetensors`, or shards and their index under transformers' names.
        steps: the plan, see `weight_map.plan`.
        checkpoint: the source of the steps' inputs.
        max_shard_size: bytes, or a text like "5GB"; a larger tensor gets a shard of its own.

    Returns:
        The `fingerprint` of the written tensors.

    Raises:
        CheckpointError: a tensor of the source or of the result has NaN or infinite values.
        OSError: a file cannot be written.
    """
    results = {name: step.result for name, step in steps.items()}
    split = split_torch_state_dict_into_shards(
        results,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=shard_size(max_shard_size),
    )
    digests: dict[str, tuple[torch.Size, str]] = {}
    total, done = sum(tensor.nbytes for tensor in results.values()), 0
    with ThreadPoolExecutor(1) as thread:  # computes SHA-256 while the next tensor is read and the shard is written
        for filename, names in split.filename_to_tensors.items():
            shard, hashes = {}, {}
            for name in names:
                shard[name] = make_tensor(name, steps[name], checkpoint)
                hashes[name] = thread.submit(digest, pieces(shard[name]))
                done += shard[name].nbytes
                if progress is not None and done < total:
                    progress(done, total)
            save_shard(shard, folder / filename)
            digests |= {name: (tensor.shape, hashes[name].result()) for name, tensor in shard.items()}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    if progress is not None:
        progress(total, total)
    return combine(digests)


def make_tensor(name: str, step: Step, checkpoint: Checkpoint) -> torch.Tensor:
    """Compute a tensor, contiguous and with its own memory, as safetensors requires. Raises as `write_shards`."""
    inputs = [checkpoint.read(source) for source in step.inputs]
    tensor = step.make(*inputs)
    memory = {source.untyped_storage().data_ptr() for source in inputs}
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.untyped_storage().data_ptr() in memory:
        tensor = tensor.clone(memory_format=torch.contiguous_format).resolve_neg()
    if all(map(is_finite, pieces(tensor))):
        return tensor
    if sources := nonfinite_tensors(checkpoint):
        items = [f"{file}: {source}" for source, file in sources.items()]
        raise CheckpointError(
            lines("Weights with NaN or infinite values (the file is damaged, or the training diverged)", items)
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    raise CheckpointError(
        f"{name} becomes infinite: the largest {dtype} is {torch.finfo(tensor.dtype).max:.5g}, and a value "
        f"computed from {', '.join(step.inputs)} is larger. Choose a wider dtype, such as bfloat16."
    )


def save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the usual permissions. (safetensors makes it readable by its owner only.)"""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(mode)
