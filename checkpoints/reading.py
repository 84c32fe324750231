# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints one tensor at a time."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.files import NAMES
from diffllama.checkpoints.pickles import read_pickle
from diffllama.checkpoints.tensor_values import DTYPES, PIECE, data, digest, is_finite, pieces


PICKLES = (".bin", ".pt", ".pth")
SUFFIXES = (".safetensors", *PICKLES)


class TensorFile(Protocol):
    """Some tensors of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    """Name -> shape and dtype, on the meta device."""
    path: Path

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values."""

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor's values, a piece at a time, see `tensor_values.pieces`."""


class TensorsInMemory:
    """A state dict, read from a file."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        self.values, self.path = tensors, path
        self.tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values."""
        return self.values[name]

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor's values, a piece at a time."""
        return pieces(self.values[name])


class SafetensorsFile:
    """A safetensors file; nothing of it stays open or in memory.

    Raises:
        SafetensorError: the file is cut off or is none of these.
        CheckpointError: it has tensors that are not floating-point numbers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Checks that the header describes the file, to the last byte. ("pt" would map the whole file as memory that may
        # be written, which counts as allocated where memory is limited, as in `check`.)
        with safe_open(path, "np"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.header = file.read(length)
        entries = {name: entry for name, entry in json.loads(self.header).items() if name != "__metadata__"}
        if others := [f"{name} is {entry['dtype']}" for name, entry in entries.items() if entry["dtype"] not in DTYPES]:
            raise CheckpointError(
                f"holds other than floating-point numbers, of {', '.join(DTYPES)}: " + ", ".join(others)
            )
        self.tensors = {
            name: torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
            for name, entry in entries.items()
        }
        self.ranges = {name: [8 + length + end for end in entry["data_offsets"]] for name, entry in entries.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values."""
        try:
            with safe_open(self.path, "pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise OSError(f"{self.path} has changed while it was read: {error}.") from error

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor's values, a piece at a time."""
        dtype, rest = self.tensors[name].dtype, self.tensors[name].numel()
        with self.path.open("rb") as file:
            file.seek(self.ranges[name][0])
            while rest:
                piece = torch.empty(min(rest, PIECE), dtype=dtype)
                if file.readinto(data(piece)) < piece.nbytes:
                    raise OSError(f"{self.path} has become shorter while it was read.")
                rest -= len(piece)
                yield piece


class Checkpoint:
    """The tensors of one or more files.

    Args:
        homes: name -> the file with the tensor, and its name there.
        index_sha256: SHA-256 of what lists the tensors: an index of shards, or the header of a single safetensors file,
            or the whole of any other file.

    Attributes:
        tensors: name -> shape and dtype, on the meta device.
    """

    def __init__(self, homes: Mapping[str, tuple[TensorFile, str]], index_sha256: str) -> None:
        self.homes = homes
        self.tensors = {name: file.tensors[inside] for name, (file, inside) in homes.items()}
        self.index_sha256 = index_sha256

    @classmethod
    def of_file(cls, file: TensorFile) -> "Checkpoint":
        """The tensors of one file."""
        return cls({name: (file, name) for name in file.tensors}, sha256(file))

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values."""
        file, inside = self.homes[name]
        return file.read(inside)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor's values, a piece at a time."""
        file, inside = self.homes[name]
        return file.pieces(inside)

    def drop(self, name: str) -> None:
        """Leaves a tensor out."""
        del self.tensors[name]


def nonfinite_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Finds the tensors with NaN or infinite values: tensor name -> file name.

    Reads every value, at most `PIECE` at a time.
    """
    return {
        name: checkpoint.homes[name][0].path.name
        for name in checkpoint.tensors
        if not all(map(is_finite, checkpoint.pieces(name)))
    }


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 of the names, shapes and values of all tensors.

    Equal values have equal fingerprints in all dtypes but float64. Reads every value, at most `PIECE` at a time.
    """
    tensors = checkpoint.tensors.items()
    return combine({name: (tensor.shape, digest(checkpoint.pieces(name))) for name, tensor in tensors})


def combine(digests: Mapping[str, tuple[torch.Size, str]]) -> str:
    """The `fingerprint` of tensors whose shapes and digests are known."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def open_checkpoint(src: Path) -> Checkpoint:
    """Opens a checkpoint. Values are read later, except from pickles that are too old for memory mapping.

    Args:
        src: a file (.safetensors, .bin, .pt, .pth), or a folder with weights as transformers names them (one file or
            shards with an index).

    Raises:
        FileNotFoundError: there are no weights, or shards are missing.
        CheckpointError: files that cannot be read, or hold other things than tensors of floating-point numbers.
    """
    paths, index = ([src], None) if src.is_file() else weight_files(src)
    if missing := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}. Download them again.")
    homes: dict[str, tuple[TensorFile, str]] = {}
    faults = []
    for path in paths:
        try:
            file = open_file(path)
        except (SafetensorError, ValueError, OSError, RecursionError) as error:
            faults.append(f"{path.name}: {error}")
            continue
        faults += [f"{path.name}: {name} is in another file too" for name in file.tensors if name in homes]
        homes |= {name: (file, name) for name in file.tensors}
    if faults:
        raise CheckpointError(lines(f"{src} has weights that cannot be read", faults))
    return Checkpoint(homes, hashlib.sha256(index.read_bytes()).hexdigest() if index else sha256(file))


def open_file(path: Path) -> TensorFile:
    """Opens one file of weights.

    Raises:
        SafetensorError, ValueError, OSError: it cannot be read, or holds other things than floating-point numbers.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"is none of {', '.join(SUFFIXES)}")
    with path.open("rb") as file:
        if file.read(24) == b"version https://git-lfs.":
            raise ValueError("is a pointer to the file, which git-lfs has not downloaded")
    return TensorsInMemory(read_pickle(path), path) if path.suffix in PICKLES else SafetensorsFile(path)


def weight_files(folder: Path) -> tuple[list[Path], Path | None]:
    """The files of a folder's weights, and their index if there is one."""
    for name in NAMES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name], None
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                inside = [folder / shard for shard in shards if Path(shard).name == shard]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{index} is no index of shards: {error!r}.") from error
            if not inside or len(inside) != len(shards):
                raise CheckpointError(f"{index} must name files of its own folder, got {shards}.")
            return inside, index
    raise FileNotFoundError(f"{folder} has no weights: no {' or '.join(NAMES)} and no index of shards of these.")


def sha256(file: TensorFile) -> str:
    """SHA-256 of a safetensors file's header, or of the whole of another file."""
    digest = hashlib.sha256(file.header if isinstance(file, SafetensorsFile) else b"")
    if not isinstance(file, SafetensorsFile):
        with file.path.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Checks the names and shapes of tensors against those that a configuration asks for.

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
        raise CheckpointError(lines(f"{where} does not have the tensors that its configuration asks for", faults))
