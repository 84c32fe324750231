# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, read a tensor at a time, and safetensors shards, written a tensor at a time.

The safetensors library reads single tensors but writes only files whose tensors are all in memory, so the writer is
here. A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin and end of
its bytes), and the bytes of the tensors, one after another.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open

from diffllama.conversion.weight_map import CheckpointError, Step, lines


DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that are converted, by their names in safetensors files."""

PICKLES = (".bin", ".pt", ".pth")
SUFFIXES = (".safetensors", *PICKLES)
NAMES = ("model.safetensors", "pytorch_model.bin")
"""What transformers calls a folder's weights, or with `.index.json` behind it, the index of their shards."""

Progress = Callable[[int, int], None]
"""Is called with the number of bytes written and their total."""


class TensorFile(Protocol):
    """Some tensors of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    """Name -> shape and dtype, on the meta device."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values."""

    def copy(self, name: str, out: BinaryIO) -> None:
        """Appends a tensor's bytes to an unbuffered file."""


class TensorsInMemory:
    """A state dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.values = tensors
        self.tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values."""
        return self.values[name]

    def copy(self, name: str, out: BinaryIO) -> None:
        """Appends a tensor's bytes to an unbuffered file."""
        write(self.values[name], out)


class SafetensorsFile:
    """A safetensors file; nothing of it stays open or in memory.

    Raises:
        SafetensorError: the file is cut off or is none of these.
        CheckpointError: it has tensors that are not floating-point numbers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, "pt"):
            pass  # checks that the header describes the file, to the last byte
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

    def copy(self, name: str, out: BinaryIO) -> None:
        """Appends a tensor's bytes to an unbuffered file."""
        begin, end = self.ranges[name]
        with self.path.open("rb", buffering=0) as file:
            while begin < end:
                count = send(file, begin, end - begin, out)
                if count == 0:
                    raise OSError(f"{self.path} has become shorter while it was read.")
                begin += count


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
    def of_file(cls, file: TensorFile, path: Path) -> "Checkpoint":
        """The tensors of one file."""
        return cls({name: (file, name) for name in file.tensors}, sha256(file, path))

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values."""
        file, inside = self.homes[name]
        return file.read(inside)

    def copy(self, name: str, out: BinaryIO) -> None:
        """Appends a tensor's bytes to an unbuffered file."""
        file, inside = self.homes[name]
        file.copy(inside, out)

    def drop(self, name: str) -> None:
        """Leaves a tensor out."""
        del self.tensors[name]


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 of the tensors' names, shapes and first values: equal weights have one, trained ones have another."""
    digest = hashlib.sha256()
    for name, (file, inside) in sorted(checkpoint.homes.items(), key=lambda item: item[0]):
        digest.update(f"{name} {list(file.tensors[inside].shape)} ".encode())
        if isinstance(file, SafetensorsFile):
            begin, end = file.ranges[inside]
            with file.path.open("rb") as opened:
                opened.seek(begin)
                digest.update(opened.read(min(end - begin, 4096)))
    return digest.hexdigest()


def open_checkpoint(src: Path) -> Checkpoint:
    """Opens weights. Values are read later, except those of pickles too old to be mapped into memory.

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
    return Checkpoint(homes, hashlib.sha256(index.read_bytes()).hexdigest() if index else sha256(file, paths[0]))


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
    return TensorsInMemory(read_pickle(path)) if path.suffix in PICKLES else SafetensorsFile(path)


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
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index} is no index of shards: {error!r}.") from error
            if not inside or len(inside) != len(shards):
                raise CheckpointError(f"{index} must name files of its own folder, got {shards}.")
            return inside, index
    raise FileNotFoundError(f"{folder} has no weights: no {' or '.join(NAMES)} and no index of shards of these.")


def sha256(file: TensorFile, path: Path) -> str:
    """SHA-256 of a safetensors file's header, or of the whole of another file."""
    digest = hashlib.sha256(file.header if isinstance(file, SafetensorsFile) else b"")
    if not isinstance(file, SafetensorsFile):
        with path.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickled state dict, without running code from it.

    Dictionaries and lists of state dicts become one, names joined by dots; a state dict under `model` or `state_dict`
    stands for the file.

    Raises:
        ValueError: the file holds anything but tensors of floating-point numbers, or is cut off, or would run code.
    """
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\3\4"  # pickles from before torch 1.6 are not, and cannot be mapped into memory
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it names {named[1]}, and " if named else ""
        raise ValueError(f"is no pickle of plain tensors; {what}nothing else is read, for it could run code") from error
    except Exception as error:  # damaged pickles fail anywhere in torch
        reason = " ".join((type(error).__name__, *str(error).split()))
        raise ValueError(f"torch cannot load it, it may be cut off: {reason}") from error
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
            raise ValueError(f"two tensors are called {name}")
        else:
            tensors[name] = value.detach()

    collect(content, "")
    return tensors


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
