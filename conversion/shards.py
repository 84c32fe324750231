# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Safetensors shards and their index."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards

from diffllama.conversion.checkpoints import Checkpoint
from diffllama.conversion.tensor_bytes import file_header, write, write_bytes
from diffllama.conversion.weight_map import Step


Progress = Callable[[int, int], None]
"""Is called with the number of bytes written and their total."""


def write_shards(
    folder: Path,
    steps: Mapping[str, Step],
    checkpoint: Checkpoint,
    max_shard_size: int | str = "5GB",
    stem: str = "model",
    progress: Progress | None = None,
) -> None:
    """Carries out a plan, with one tensor in memory at a time.

    Args:
        folder: where `{stem}.safetensors` is written, or shards and their index, named as transformers names them.
        steps: the plan, see `weight_map.plan`.
        checkpoint: where the steps' inputs come from.
        max_shard_size: bytes, or a text like "5GB"; a larger tensor gets a shard of its own.
        progress: see `Progress`.
    """
    results = {name: step.result for name, step in steps.items()}
    size = re.fullmatch(r"(\d+)([KMGT]B)?", str(max_shard_size))
    if size is None or int(size[1]) == 0:
        raise ValueError(f"`max_shard_size` must be a number of bytes or a text like '5GB', got {max_shard_size!r}.")
    split = split_torch_state_dict_into_shards(
        results,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=size[0] if size[2] else int(size[1]),
    )
    total, done = sum(tensor.nbytes for tensor in results.values()), 0
    for filename, names in split.filename_to_tensors.items():
        # Wide dtypes first, so that every tensor begins at a multiple of its elements' size
        names = sorted(names, key=lambda name: -results[name].element_size())
        with (folder / filename).open("wb", buffering=0) as out:
            write_bytes(memoryview(file_header({name: results[name] for name in names})), out)
            for name in names:
                step = steps[name]
                if step.copied:
                    checkpoint.copy(step.inputs[0], out)
                else:
                    write(step.make(*map(checkpoint.read, step.inputs)), out)
                done += step.result.nbytes
                if progress is not None:
                    progress(done, total)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
