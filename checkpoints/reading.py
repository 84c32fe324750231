# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints one tensor at a time."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from huggingface_hub.utils.sha import sha_fileobj
from safetensors import SafetensorError, safe_open

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.files import NAMES
from diffllama.checkpoints.pickles import read_pickle
from diffllama.checkpoints.tensor_values import DTYPES, PIECE, data, digest, is_finite, pieces


PICKLES = (".bin", ".pt", ".pth")
SUFFIXES = (".safetensors", *PICKLES)


class TensorInMemory:
    """A tensor in memory. `meta` has its shape and dtype, on the meta device."""

    def __init__(self, values: torch.Tensor, path: Path) -> None:
        self.values, self.path, self.meta = values, path, values.to("meta")

    def read(self) -> torch.Tensor:
        """Return the tensor with its values."""
        return self.values

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the values in pieces, see `tensor_values.pieces`."""
        return pieces(self.values)


class TensorInSafetensors:
    """A tensor in a safetensors file, which is not kept open: its name there, and the offset of its values."""

    def __init__(self, path: Path, name: str, meta: torch.Tensor, start: int) -> None:
        self.path, self.name, self.meta, self.start = path, name, meta, start

    def read(self) -> torch.Tensor:
        """Return the tensor with its values."""
        try:
            with safe_open(self.path, "pt") as file:
                return file.get_tensor(self.name)
        except SafetensorError as error:
            raise OSError(f"{self.path} changed while it was read: {error}.") from error

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the values in pieces."""
        rest = self.meta.numel()
        with self.path.open("rb") as file:
            file.seek(self.start)
            while rest:
                piece = torch.empty(min(rest, PIECE), dtype=self.meta.dtype)
                if file.readinto(data(piece)) < piece.nbytes:
                    raise OSError(f"{self.path} was truncated while it was read.")
                rest -= len(piece)
                yield piece


StoredTensor = TensorInMemory | TensorInSafetensors


class Checkpoint:
    """The tensors of one or more files.

    Args:
        homes: name -> place where the tensor is stored, maybe under another name.
        index_sha256: SHA-256 of the index of shards, of the header of a single safetensors file, or of any other file
            as a whole.

    Attributes:
        tensors: name -> shape and dtype, on the meta device.
    """

    def __init__(self, homes: Mapping[str, StoredTensor], index_sha256: str) -> None:
        self.homes, self.index_sha256 = homes, index_sha256
        self.tensors = {name: home.meta for name, home in homes.items()}

    @classmethod
    def in_memory(cls, tensors: Mapping[str, torch.Tensor], path: Path) -> "Checkpoint":
        """Wrap tensors that were read from a file."""
        return cls({name: TensorInMemory(tensor, path) for name, tensor in tensors.items()}, sha256(path))

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor with its values."""
        return self.homes[name].read()

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor's values in pieces, see `tensor_values.pieces`."""
        return self.homes[name].pieces()

    def drop(self, name: str) -> None:
        """Leave a tensor out."""
        del self.tensors[name]


def nonfinite_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Find the tensors with NaN or infinite values: tensor name -> file name.

    Reads every value, at most `PIECE` at a time.
    """
    return {
        name: checkpoint.homes[name].path.name
        for name in checkpoint.tensors
        if not all(map(is_finite, checkpoint.pieces(name)))
    }


def fingerprint(checkpoint: Checkpoint) -> str:
    """Compute the SHA-256 of the names, shapes and values of all tensors.

    Equal values have equal fingerprints in all dtypes but float64. Reads every value, at most `PIECE` at a time.
    """
    tensors = checkpoint.tensors.items()
    return combine({name: (tensor.shape, digest(checkpoint.pieces(name))) for name, tensor in tensors})


def combine(digests: Mapping[str, tuple[torch.Size, str]]) -> str:
    """Compute the `fingerprint` of tensors from their shapes and digests."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def open_checkpoint(src: Path) -> Checkpoint:
    """Open a checkpoint. Values are read later, except those of pickles that are too old for memory mapping.

    Args:
        src: a file (.safetensors, .bin, .pt, .pth), or a folder with weights as transformers names them (one file or
            shards with an index).

    Raises:
        FileNotFoundError: there are no weights, or shards are missing.
        CheckpointError: a file cannot be read, or contains anything else than floating-point tensors.
    """
    paths, index = ([src], None) if src.is_file() else weight_files(src)
    if missing := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{index} names files that do not exist: {', '.join(missing)}. Download them again.")
    homes: dict[str, StoredTensor] = {}
    faults = []
    for path in paths:
        try:
            tensors = open_file(path)
        except (SafetensorError, ValueError, OSError, RecursionError) as error:
            faults.append(f"{path.name}: {error}")
            continue
        faults += [f"{path.name}: {name} is in another file too" for name in tensors if name in homes]
        homes |= tensors
    if faults:
        raise CheckpointError(lines(f"{src} has weights that cannot be read", faults))
    return Checkpoint(homes, sha256(index or paths[0]))


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of one file. Raises `SafetensorError`, `ValueError` or `OSError` if it is not valid."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"must have one of the suffixes {', '.join(SUFFIXES)}")
    with path.open("rb") as file:
        if file.read(24) == b"version https://git-lfs.":
            raise ValueError("is a git-lfs pointer; download the file itself with `git lfs pull`")
    if path.suffix in PICKLES:
        return {name: TensorInMemory(tensor, path) for name, tensor in read_pickle(path).items()}
    # Opening checks that the header describes the file to its last byte. ("pt" would map the whole file as writable
    # memory, which counts as allocated under a memory limit, as in `check`.)
    with safe_open(path, "np"):
        pass
    header = safetensors_header(path)
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    if others := [f"{name} is {entry['dtype']}" for name, entry in entries.items() if entry["dtype"] not in DTYPES]:
        raise ValueError(f"has tensors whose dtype is not one of {', '.join(DTYPES)}: " + ", ".join(others))
    tensors: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        meta = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
        tensors[name] = TensorInSafetensors(path, name, meta, 8 + len(header) + entry["data_offsets"][0])
    return tensors


def safetensors_header(path: Path) -> bytes:
    """Read the JSON header of a safetensors file, which follows its length."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def weight_files(folder: Path) -> tuple[list[Path], Path | None]:
    """Return the files of a folder's weights, and their index if there is one."""
    for name in NAMES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name], None
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                inside = [folder / shard for shard in shards if Path(shard).name == shard]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index} is not an index of shards: {error!r}.") from error
            if not inside or len(inside) != len(shards):
                raise CheckpointError(f"{index} must name files of its own folder, got {shards}.")
            return inside, index
    raise FileNotFoundError(f"{folder} has no weights: neither {' nor '.join(NAMES)}, nor an index of their shards.")


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a safetensors file's header, or of any other file as a whole."""
    if path.suffix == ".safetensors":
        return hashlib.sha256(safetensors_header(path)).hexdigest()
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Check the names and shapes of tensors against those that a configuration expects.

    Raises:
        CheckpointError: lists every missing, extra and misshapen tensor with its shapes.
    """
    faults = [f"missing: {name} {list(expected[name].shape)}" for name in expected if name not in tensors]
    faults += [f"extra: {name} {list(tensors[name].shape)}" for name in tensors if name not in expected]
    faults += [
        f"misshapen: {name} {list(tensors[name].shape)}, must be {list(expected[name].shape)}"
        for name in expected
        if name in tensors and tensors[name].shape != expected[name].shape
    ]
    if faults:
        raise CheckpointError(lines(f"{where} does not have the tensors of its configuration", faults))
