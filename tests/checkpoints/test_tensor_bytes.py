"""Bytes are copied and written whole, or an error says why not."""

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffllama.checkpoints.reading import SafetensorsFile, open_checkpoint
from diffllama.checkpoints.tensor_bytes import DTYPES, PIECE, digest, pieces
from diffllama.checkpoints.writing import write_shards
from support.weight_files import SINGLE, all_same, as_they_are, in_memory, randoms


def copied(src: Path, dest: Path) -> bytes:
    dest.mkdir()
    checkpoint = open_checkpoint(src)
    write_shards(dest, as_they_are(checkpoint), checkpoint)
    return (dest / SINGLE).read_bytes()


def mixed(file: Path) -> dict[str, torch.Tensor]:
    """A file with tensors of all dtypes, one of them of several pieces."""
    weights = {name: randoms((3, 5), dtype) for name, dtype in DTYPES.items()} | {"large": randoms((2 * PIECE + 1,))}
    save_file(weights, file, metadata={"format": "pt"})
    return weights


@pytest.fixture(params=["copied", "made"])
def values(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[torch.Tensor, Iterator[torch.Tensor]]]:
    """Tensors, and their pieces: of a file, or of tensors in memory."""
    weights = mixed(tmp_path / SINGLE)
    file = SafetensorsFile(tmp_path / SINGLE)
    return ((w, file.pieces(name) if request.param == "copied" else pieces(w)) for name, w in weights.items())


def test_both_ways_of_copying_give_the_same_bytes(tmp_path: Path) -> None:
    weights = mixed(tmp_path / SINGLE)
    content = copied(tmp_path, tmp_path / "dest")
    made = tmp_path / "made"
    made.mkdir()
    checkpoint = open_checkpoint(tmp_path)
    write_shards(made, as_they_are(checkpoint, copied=False), checkpoint)
    assert content == (made / SINGLE).read_bytes()
    assert all_same(load_file(tmp_path / "dest" / SINGLE), weights)


class Reluctant(io.FileIO):
    """A file that takes only some of the bytes that it is given."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[: max(1, len(data) // 3)])


def test_a_disk_may_take_only_some_bytes_at_once(
    tmp_path: Path, values: Iterator[tuple[torch.Tensor, Iterator[torch.Tensor]]]
) -> None:
    for tensor, its_pieces in values:
        with Reluctant(tmp_path / "out", "wb") as out:
            digest(its_pieces, out)
        assert (tmp_path / "out").read_bytes() == bytes(tensor.view(-1).view(torch.uint8).numpy())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(values: Iterator[tuple[torch.Tensor, Iterator[torch.Tensor]]]) -> None:
    for _, its_pieces in values:
        with Path("/dev/full").open("wb", buffering=0) as out, pytest.raises(OSError, match="No space left"):
            digest(its_pieces, out)


def test_a_disk_that_is_full_in_the_middle_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(io.FileIO):
        def write(self, data: Any) -> int:
            if (room := 500 - self.tell()) == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(memoryview(data)[:room])

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1: (Small if mode == "wb" else open)(path, mode))
    checkpoint = in_memory({"a": torch.ones(500)})
    with pytest.raises(OSError, match="No space left"):
        write_shards(tmp_path, as_they_are(checkpoint), checkpoint)
    assert (tmp_path / SINGLE).stat().st_size == 500


@pytest.mark.parametrize("left", [0, 5, "all but one byte"])
def test_a_source_that_becomes_shorter_is_an_error(left: int | str, tmp_path: Path) -> None:
    mixed(tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(tmp_path / SINGLE, left if isinstance(left, int) else (tmp_path / SINGLE).stat().st_size - 1)
    last = max(checkpoint.homes["large"][0].ranges.items(), key=lambda item: item[1][1])[0]
    with pytest.raises(OSError, match=r"model\.safetensors.*shorter"):
        list(checkpoint.pieces(last))
    with pytest.raises(OSError, match=r"model\.safetensors has changed while it was read"):
        checkpoint.read(last)
