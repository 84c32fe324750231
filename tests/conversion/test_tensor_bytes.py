"""Bytes are copied and written whole, or an error says why not."""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weight_files import (
    SINGLE,
    all_same,
    as_they_are,
    in_memory,
    only_linux,
    randoms,
)

from diffllama.conversion.checkpoints import SafetensorsFile, open_checkpoint
from diffllama.conversion.shards import write_shards
from diffllama.conversion.tensor_bytes import DTYPES, write


@pytest.fixture(params=["within the kernel", "portable"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of copying."""
    if request.param == "portable":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif sys.platform != "linux":
        pytest.skip("copies within the kernel only on Linux")
    return request.param


# Copying and the disk's faults


def copied(src: Path, dest: Path) -> bytes:
    dest.mkdir()
    checkpoint = open_checkpoint(src)
    write_shards(dest, as_they_are(checkpoint), checkpoint)
    return (dest / SINGLE).read_bytes()


def mixed(file: Path) -> dict[str, torch.Tensor]:
    """A file with tensors of all dtypes, one of them of more than a megabyte."""
    weights = {name: randoms((3, 5), dtype) for name, dtype in DTYPES.items()} | {"large": randoms((600_001,))}
    save_file(weights, file, metadata={"format": "pt"})
    return weights


def test_both_ways_of_copying_give_the_same_bytes(
    tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = mixed(tmp_path / SINGLE)
    if platform == "portable":
        monkeypatch.delattr(os, "sendfile", raising=False)
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
    tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = mixed(tmp_path / SINGLE)
    if platform != "portable":
        sendfile = os.sendfile
        monkeypatch.setattr(os, "sendfile", lambda out, file, begin, n: sendfile(out, file, begin, max(1, n // 3)))
    file = SafetensorsFile(tmp_path / SINGLE)
    for method in ("copy", "write"):
        with Reluctant(tmp_path / method, "wb") as out:
            for name in weights:
                file.copy(name, out) if method == "copy" else write(file.read(name), out)
        expected = b"".join(bytes(tensor.view(-1).view(torch.uint8).numpy()) for tensor in weights.values())
        assert (tmp_path / method).read_bytes() == expected


@only_linux
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_copy_within_the_kernel_copies_otherwise(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: int) -> int:
        raise OSError(code, os.strerror(code))

    weights = mixed(tmp_path / SINGLE)
    monkeypatch.setattr(os, "sendfile", refuse)
    copied(tmp_path, tmp_path / "dest")
    assert all_same(load_file(tmp_path / "dest" / SINGLE), weights)


@only_linux
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_fails_within_the_kernel_is_an_error(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: int) -> int:
        raise OSError(code, os.strerror(code))

    mixed(tmp_path / SINGLE)
    monkeypatch.setattr(os, "sendfile", fail)
    with pytest.raises(OSError) as error:  # noqa: PT011 - its number is looked at
        copied(tmp_path, tmp_path / "dest")
    assert error.value.errno == code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("method", ["copy", "write"])
def test_a_full_disk_is_an_error(method: str, tmp_path: Path, platform: str) -> None:
    mixed(tmp_path / SINGLE)
    file = SafetensorsFile(tmp_path / SINGLE)
    with Path("/dev/full").open("wb", buffering=0) as out, pytest.raises(OSError, match="No space left"):
        file.copy("F32", out) if method == "copy" else write(file.read("F32"), out)


def test_a_disk_that_is_full_in_the_middle_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(io.FileIO):
        def write(self, data: Any) -> int:
            if (room := 500 - self.tell()) == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(memoryview(data)[:room])

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1: (Small if mode == "wb" else open)(path, mode))
    checkpoint = in_memory({"a": torch.ones(500)})
    with pytest.raises(OSError, match="No space left"):
        write_shards(tmp_path, as_they_are(checkpoint), checkpoint)
    assert (tmp_path / SINGLE).stat().st_size == 500


@pytest.mark.parametrize("left", [0, 5, "all but one byte"])
def test_a_source_that_becomes_shorter_is_an_error(left: int | str, tmp_path: Path, platform: str) -> None:
    mixed(tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    begin, end = checkpoint.homes["large"][0].ranges["large"]
    assert end - begin > 1 << 20
    os.truncate(tmp_path / SINGLE, left if isinstance(left, int) else (tmp_path / SINGLE).stat().st_size - 1)
    last = max(checkpoint.homes["large"][0].ranges.items(), key=lambda item: item[1][1])[0]
    with (
        (tmp_path / "out").open("wb", buffering=0) as out,
        pytest.raises(OSError, match=r"model\.safetensors.*shorter"),
    ):
        checkpoint.copy(last, out)
    with pytest.raises(OSError, match=r"model\.safetensors has changed while it was read"):
        checkpoint.read(last)
