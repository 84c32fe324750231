"""Weight files, valid and broken, and their content."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.reading import Checkpoint, TensorInMemory, open_checkpoint
from diffllama.checkpoints.writing import Step


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc or /dev")


def randoms(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bytes: any float except NaN and infinity."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    return values.where(values.isfinite(), 0)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, bit for bit."""
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


def all_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(same(got[name], expected[name]) for name in expected)


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def in_memory(tensors: dict[str, torch.Tensor]) -> Checkpoint:
    return Checkpoint({name: TensorInMemory(tensor, Path()) for name, tensor in tensors.items()}, "")


def as_they_are(checkpoint: Checkpoint) -> dict[str, Step]:
    """Return the plan that keeps all tensors and names."""
    return {name: Step((name,), lambda tensor: tensor, meta) for name, meta in checkpoint.tensors.items()}


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder, each of which occurs once."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        assert not found.keys() & weights.keys()
        found |= weights
    return found


def sharded(folder: Path, suffix: str = "safetensors") -> dict[str, torch.Tensor]:
    """Write three shards of one or two tensors, and their index."""
    folder.mkdir(exist_ok=True)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weights, weight_map = {}, {}
    for i, names in enumerate(("ab", "c", "de")):
        shard = {name: randoms((3, i + 1), seed=ord(name)) for name in names}
        filename = f"{stem}-0000{i + 1}-of-00003.{suffix}"
        (save_file if suffix == "safetensors" else torch.save)(shard, folder / filename)
        weights |= shard
        weight_map |= dict.fromkeys(names, filename)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weights


def shards(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix != ".json")


def cut(file: Path, count: int = 1) -> None:
    """Remove the last bytes of a file."""
    os.truncate(file, file.stat().st_size - count)


def save(file: Path, content: Any) -> Path:
    torch.save(content, file)
    return file


def write_file(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def save_legacy(file: Path, content: Any) -> Path:
    """Save a pickle as torch did before 1.6."""
    torch.save(content, file, _use_new_zipfile_serialization=False)
    return file


FORMATS: dict[str, Callable[[Path, Any], Path]] = {"zip": save, "legacy": save_legacy}
ignore_protocols = pytest.mark.filterwarnings("ignore:Detected pickle protocol")
each_format = pytest.mark.parametrize("to_file", [pytest.param(to_file, id=name) for name, to_file in FORMATS.items()])


def message(src: Path) -> str:
    """Return the error message for weights that cannot be read."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(src)
    return str(error.value)


A, B, C = (randoms((2, 3), seed=seed) for seed in range(3))
