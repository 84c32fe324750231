import errno
import gc
import hashlib
import io
import json
import os
import pickle
import random
import re
import sys
import tempfile
import weakref
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import llama, snapshot
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import tiny_config
from transformers import LlamaForCausalLM

from diffllama.conversion.checkpoints import (
    DTYPES,
    Checkpoint,
    SafetensorsFile,
    TensorsInMemory,
    open_checkpoint,
    write,
    write_shards,
)
from diffllama.conversion.weight_map import CheckpointError, Rule, Step, plan


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc or /dev")


@pytest.fixture(params=["within the kernel", "portable"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of copying."""
    if request.param == "portable":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif sys.platform != "linux":
        pytest.skip("copies within the kernel only on Linux")
    return request.param


def randoms(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bytes: every float there is, NaNs too."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


def all_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(same(got[name], expected[name]) for name in expected)


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def in_memory(tensors: dict[str, torch.Tensor]) -> Checkpoint:
    file = TensorsInMemory(tensors)
    return Checkpoint({name: (file, name) for name in tensors}, "")


def as_they_are(checkpoint: Checkpoint, copied: bool = True) -> dict[str, Step]:
    """The plan that changes nothing, neither tensors nor names."""
    return {name: Step((name,), lambda tensor: tensor, meta, copied) for name, meta in checkpoint.tensors.items()}


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a folder, none of them twice."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        assert not found.keys() & weights.keys()
        found |= weights
    return found


def sharded(folder: Path, suffix: str = "safetensors") -> dict[str, torch.Tensor]:
    """Writes three shards of a tensor or two, and their index."""
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
    """Takes a file's last bytes away."""
    os.truncate(file, file.stat().st_size - count)


def save(file: Path, content: Any) -> Path:
    torch.save(content, file)
    return file


def write_file(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def save_legacy(file: Path, content: Any) -> Path:
    """Saves a pickle as torch did before 1.6."""
    torch.save(content, file, _use_new_zipfile_serialization=False)
    return file


FORMATS: dict[str, Callable[[Path, Any], Path]] = {"zip": save, "legacy": save_legacy}
ignore_protocols = pytest.mark.filterwarnings("ignore:Detected pickle protocol")
each_format = pytest.mark.parametrize("to_file", [pytest.param(to_file, id=name) for name, to_file in FORMATS.items()])


def message(src: Path) -> str:
    """What is said of weights that cannot be read."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(src)
    return str(error.value)


# Writing


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tensors=st.dictionaries(
        # JSON has no words for halves of surrogate pairs, and safetensors keeps one name for itself
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    max_shard_size=st.sampled_from(["5GB", 200, 1]),
)
def test_what_is_written_is_read_bit_for_bit(
    tensors: dict[str, tuple[torch.dtype, list[int]]], max_shard_size: int | str
) -> None:
    weights = {name: randoms(tuple(shape), dtype, i) for i, (name, (dtype, shape)) in enumerate(tensors.items())}
    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder) / name for name in ("made", "copied")]
        for root, source in zip(roots, (lambda: in_memory(weights), lambda: open_checkpoint(roots[0])), strict=True):
            root.mkdir()
            checkpoint = source()
            write_shards(root, as_they_are(checkpoint, copied=root.name == "copied"), checkpoint, max_shard_size)
            assert all_same(read_shards(root), weights)
            assert all_same(values(open_checkpoint(root)), weights)
            for file in root.glob("*.safetensors"):
                with safe_open(file, "pt") as opened:
                    assert opened.metadata() == {"format": "pt"}
                for name, (begin, _) in SafetensorsFile(file).ranges.items():
                    assert begin % weights[name].element_size() == 0


@pytest.mark.parametrize(
    "name", ["a", '"', "\\", "'", "\n", "\0", "ü", "名", "🙂", "{i}", "a.b", "/", "../x", " ", ""], ids=ascii
)
def test_any_name_is_kept(name: str, tmp_path: Path) -> None:
    weights = {name: torch.ones(3), f"{name}2": torch.zeros(1)}
    write_shards(tmp_path, as_they_are(in_memory(weights)), in_memory(weights))
    assert all_same(load_file(tmp_path / SINGLE), weights)
    assert all_same(values(open_checkpoint(tmp_path)), weights)


@pytest.mark.parametrize("view", ["transposed", "expanded", "every second", "parameter", "negated"])
def test_views_are_written_as_what_they_show(view: str, tmp_path: Path) -> None:
    tensor = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "expanded": torch.arange(3.0).expand(2, 3),
        "every second": torch.arange(9.0)[1::2],
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    }[view]
    for copied in (True, False):
        write_shards(tmp_path, as_they_are(in_memory({"a": tensor}), copied), in_memory({"a": tensor}))
        assert torch.equal(load_file(tmp_path / SINGLE)["a"], tensor)


def test_one_tensor_may_become_many(tmp_path: Path) -> None:
    checkpoint = in_memory({"a": torch.randn(4, 3)})
    rules = (Rule("x"), Rule("y"), Rule("z", (lambda tensor, config: tensor.T,)))
    write_shards(tmp_path, plan(checkpoint.tensors, {"a": rules}, tiny_config()), checkpoint)
    a = checkpoint.read("a")
    assert all_same(load_file(tmp_path / SINGLE), {"x": a, "y": a, "z": a.T})


def test_transformers_loads_the_shards(tmp_path: Path) -> None:
    source, folder = llama(tmp_path / "src"), tmp_path / "dest"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    checkpoint = open_checkpoint(source)
    steps = plan(checkpoint.tensors, {name: Rule(name) for name in checkpoint.tensors}, tiny_config())
    assert all(step.copied for step in steps.values())
    write_shards(folder, steps, checkpoint, "60KB")

    weights, index = load_file(source / SINGLE), json.loads((folder / INDEX).read_text())
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, 1 + len(files))]
    assert all((folder / file).stat().st_size < 60_000 + 2000 for file in files)  # and the header
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert index["weight_map"] == {name: file for file in files for name in load_file(folder / file)}
    assert all_same(read_shards(folder), weights)
    loaded, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert all_same(loaded.state_dict(), LlamaForCausalLM.from_pretrained(source).state_dict())


def test_few_tensors_are_one_file_without_index(tmp_path: Path) -> None:
    weights = {"a": randoms((3,)), "b": randoms((2, 2), torch.bfloat16)}
    write_shards(tmp_path, as_they_are(in_memory(weights)), in_memory(weights), stem="attention")
    assert [file.name for file in tmp_path.iterdir()] == ["attention.safetensors"]
    assert all_same(load_file(tmp_path / "attention.safetensors"), weights)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    weights = {"a": randoms((2,)), "large": randoms((50,)), "b": randoms((2,)), "c": randoms((2,))}
    write_shards(tmp_path, as_they_are(in_memory(weights)), in_memory(weights), max_shard_size=100)
    assert sorted(sorted(load_file(file)) for file in tmp_path.glob("*.safetensors")) == [["a", "b", "c"], ["large"]]


@pytest.mark.parametrize("max_shard_size", ["5GB", 50])
def test_progress_counts_bytes_up_to_their_total(max_shard_size: int | str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    weights = {"a": randoms((3,), torch.float64), "b": randoms(()), "none": randoms((0,)), "c": randoms((9, 2))}
    checkpoint = in_memory(weights)
    write_shards(
        tmp_path, as_they_are(checkpoint), checkpoint, max_shard_size, progress=lambda *count: told.append(count)
    )
    done = [count for count, _ in told]
    assert {total for _, total in told} == {24 + 4 + 72}
    assert len(done) == len(weights)
    assert (done[-1], done) == (24 + 4 + 72, sorted(done))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref] = []
    most = []

    def born(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(tensor))
        most.append(sum(reference() is not None for reference in alive))
        return tensor

    class Source(TensorsInMemory):
        def read(self, name: str) -> torch.Tensor:
            return born(super().read(name).clone())

    file = Source({f"{i}": torch.ones(5, 3) for i in range(10)})
    checkpoint = Checkpoint({name: (file, name) for name in file.tensors}, "")
    steps = {
        name: Step((name,), lambda tensor: born(tensor.T), torch.empty(3, 5, device="meta"))
        for name in checkpoint.tensors
    }
    gc.disable()  # references alone have to do
    try:
        write_shards(tmp_path, steps, checkpoint, max_shard_size=150)
    finally:
        gc.enable()
    assert most == [1, 2] * 10  # what is read, and what is made of it
    assert len(read_shards(tmp_path)) == 10


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


# Reading


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_read_by_their_index(suffix: str, tmp_path: Path) -> None:
    weights = sharded(tmp_path, suffix)
    assert all_same(values(open_checkpoint(tmp_path)), weights)


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin", "x.pt", "x.pth"])
def test_a_single_file_is_read_whatever_its_name(name: str, tmp_path: Path) -> None:
    weights = {"a": randoms((2, 3)), "b": randoms((), torch.bfloat16)}
    (save_file if name == "x.safetensors" else torch.save)(weights, tmp_path / name)
    assert all_same(values(open_checkpoint(tmp_path / name)), weights)


def test_a_checkpoint_knows_shapes_and_dtypes_without_values(tmp_path: Path) -> None:
    weights = {name: randoms((i, 2), dtype) for i, (name, dtype) in enumerate(DTYPES.items())}
    save_file(weights, tmp_path / SINGLE)
    save(tmp_path / "x.bin", weights)
    for file in (SINGLE, "x.bin"):
        tensors = open_checkpoint(tmp_path / file).tensors
        assert {name: (t.shape, t.dtype, t.is_meta) for name, t in tensors.items()} == {
            name: (t.shape, t.dtype, True) for name, t in weights.items()
        }


def test_a_tensor_that_is_dropped_is_left_out(tmp_path: Path) -> None:
    checkpoint = in_memory({"a": torch.ones(2), "b": torch.ones(3)})
    checkpoint.drop("a")
    write_shards(tmp_path, as_they_are(checkpoint), checkpoint)
    assert list(load_file(tmp_path / SINGLE)) == ["b"]


@pytest.mark.parametrize("pickles", ["single", "shards"])
@pytest.mark.parametrize("safetensors", ["single", "shards"])
def test_safetensors_are_preferred_to_pickles(safetensors: str, pickles: str, tmp_path: Path) -> None:
    for kind, suffix, name in ((pickles, "bin", "pytorch_model.bin"), (safetensors, "safetensors", SINGLE)):
        if kind == "shards":
            weights = sharded(tmp_path, suffix)
        else:
            weights = {suffix: randoms((2,))}
            (save_file if suffix == "safetensors" else torch.save)(weights, tmp_path / name)
    assert all_same(values(open_checkpoint(tmp_path)), weights)


def test_a_single_file_is_preferred_to_shards(tmp_path: Path) -> None:  # as transformers does
    sharded(tmp_path)
    save_file({"single": randoms((2,))}, tmp_path / SINGLE)
    assert list(open_checkpoint(tmp_path).tensors) == ["single"]


@each_format
def test_pickles_are_read(to_file: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    weights = {name: randoms((3, 2), dtype) for name, dtype in DTYPES.items()} | {"none": randoms((0, 4))}
    assert all_same(values(open_checkpoint(to_file(tmp_path / "x.bin", weights))), weights)


@each_format
def test_pickled_views_and_shared_storage_are_read_as_what_they_show(
    to_file: Callable[[Path, Any], Path], tmp_path: Path
) -> None:
    whole = torch.randn(6, 8)
    weights = {
        "whole": whole,
        "transposed": whole.T,
        "rows": whole[2:4],
        "columns": whole[:, 3:5],
        "strided": whole[::2, ::3],
        "expanded": whole[0].expand(3, 8),
        "parameter": torch.nn.Parameter(whole[0]),
    }
    checkpoint = open_checkpoint(to_file(tmp_path / "x.bin", weights))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in values(checkpoint).items())
    assert not any(tensor.requires_grad for tensor in values(checkpoint).values())
    write_shards(tmp_path, as_they_are(checkpoint), checkpoint)
    assert all_same(load_file(tmp_path / SINGLE), {name: tensor.detach() for name, tensor in weights.items()})


A, B, C = (randoms((2, 3), seed=seed) for seed in range(3))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model": {"a": A, "b": B}, "optimizer": {"lr": 0.1}, "step": 7}, {"a": A, "b": B}),
        ({"state_dict": {"a": A}, "epoch": 3}, {"a": A}),
        ({"model": {"state_dict": {"a": A}}}, {"a": A}),
        ([{"a": A}, {"a": B}], {"0.a": A, "1.a": B}),
        (({"a": A}, {"a": B}), {"0.a": A, "1.a": B}),
        ({0: {"a": A}, 1: {"a": B}}, {"0.a": A, "1.a": B}),
        ({"layers": [{"x": {"a": A}}, [B, C]]}, {"layers.0.x.a": A, "layers.1.0": B, "layers.1.1": C}),
        ({"model": A, "b": B}, {"model": A, "b": B}),
        ({"model": [{"a": A}]}, {"model.0.a": A}),
        (torch.nn.Linear(3, 2).state_dict(), None),
    ],
    ids=["model", "state_dict", "both", "list", "tuple", "numbers", "nested", "tensor", "list of model", "module"],
)
@each_format
def test_nested_state_dicts_become_one_with_dotted_names(
    to_file: Callable[[Path, Any], Path], content: Any, expected: dict[str, torch.Tensor] | None, tmp_path: Path
) -> None:
    assert all_same(values(open_checkpoint(to_file(tmp_path / "x.bin", content))), expected or content)


NO_WEIGHTS: dict[str, Any] = {
    "step is int": {"a": A, "step": 7},
    "layers.1.name is str": {"a": A, "layers": [{"x": A}, {"name": "q"}]},
    "a.b is NoneType": {"a": {"b": None}},
    "a is float": {"a": 1.5},
    "a is torch.int64": {"a": torch.arange(3)},
    "a is torch.uint8": {"a": torch.ones(3, dtype=torch.uint8)},
    "a is torch.bool": {"a": torch.ones(3, dtype=torch.bool)},
    "a is torch.complex64": {"a": torch.ones(3, dtype=torch.complex64)},
    "a is torch.sparse_coo, not a dense tensor": {"a": torch.eye(3).to_sparse()},
    "a is without values": {"a": torch.empty(3, device="meta")},
    "two tensors are called a.b": {"a.b": A, "a": {"b": B}},
    "two tensors are called 0": {0: A, "0": B},
    "it is str": "weights",
}
"""What is said -> what is in the pickle."""


@each_format
@pytest.mark.parametrize("culprit", NO_WEIGHTS)
def test_what_is_no_tensor_of_floating_point_numbers_is_refused_by_name(
    to_file: Callable[[Path, Any], Path], culprit: str, tmp_path: Path
) -> None:
    assert f"x.bin: {culprit}" in message(to_file(tmp_path / "x.bin", NO_WEIGHTS[culprit]))


def test_a_pickled_tensor_of_eight_bits_is_refused_by_name(tmp_path: Path) -> None:  # torch has no legacy ones
    file = save(tmp_path / "x.bin", {"a": torch.ones(3).to(torch.float8_e4m3fn)})
    assert "x.bin: a is torch.float8_e4m3fn, not a tensor of floating-point numbers" in message(file)


def test_a_list_that_holds_itself_is_refused(tmp_path: Path) -> None:
    content: list[Any] = [A]
    content.append(content)
    assert "x.bin: maximum recursion depth" in message(save(tmp_path / "x.bin", content))


def test_all_other_tensors_of_a_safetensors_file_are_refused_by_name(tmp_path: Path) -> None:
    dtypes = {"I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn}
    weights = {f"layers.{name}": torch.ones(2).to(dtype) for name, dtype in dtypes.items()} | {"a": torch.ones(2)}
    save_file(weights, tmp_path / SINGLE)
    text = message(tmp_path)
    assert "model.safetensors: holds other than floating-point numbers" in text
    assert all(f"layers.{name} is {name}" in text for name in dtypes)
    assert "a is F32" not in text


@only_linux
@pytest.mark.parametrize("kind", ["safetensors", "shards", "zip", "legacy", "pickled shards"])
def test_reading_leaves_the_source_as_it_is_and_nothing_open(kind: str, tmp_path: Path) -> None:
    source, out = tmp_path / "src", tmp_path / "out"
    source.mkdir()
    if "shards" in kind:
        sharded(source, "safetensors" if kind == "shards" else "bin")
    elif kind == "safetensors":
        save_file({"a": A, "b": B}, source / SINGLE)
    else:
        FORMATS[kind](source / "pytorch_model.bin", {"a": A, "b": B})
    before, opened = snapshot(source), len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(source)
    assert len(os.listdir("/proc/self/fd")) == opened
    tensors = values(checkpoint)
    with out.open("wb", buffering=0) as file:
        for name in tensors:
            checkpoint.copy(name, file)
    tensors["a"].mul_(2)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert snapshot(source) == before


# Faults of folders and indices


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": A}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path.name} has no weights: no model\.safetensors or"):
        open_checkpoint(tmp_path)


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    first, _, last = shards(tmp_path)
    first.unlink()
    last.unlink()
    last.mkdir()
    with pytest.raises(FileNotFoundError, match=rf"index\.json names .* not there: {first.name}, {last.name}\."):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": 7}',
        '{"weight_map": {"a": 7}}',
        '{"weight_map": {"a": null, "b": "model-1.safetensors"}}',
        '{"weight_map": {"a": ["model-1.safetensors"]}}',
    ],
)
def test_what_is_no_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    assert f"{INDEX} is no index of shards" in message(tmp_path)


def test_an_index_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b"\xff\xfe\xfd")
    assert f"{INDEX} is no index of shards" in message(tmp_path)


@pytest.mark.parametrize("shard", ["../x.safetensors", "sub/x.safetensors", "/etc/passwd", "./../x.safetensors"])
def test_an_index_that_points_elsewhere_is_refused(shard: str, tmp_path: Path) -> None:
    (tmp_path / "sub" / "sub").mkdir(parents=True)
    for place in (tmp_path, tmp_path / "sub", tmp_path / "sub" / "sub"):
        save_file({"a": A}, place / "x.safetensors")
    (tmp_path / "sub" / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": shard}}))
    text = message(tmp_path / "sub")
    assert "must name files of its own folder" in text
    assert shard in text


def test_an_index_without_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    assert "must name files of its own folder, got []" in message(tmp_path)


@pytest.mark.parametrize("shard", ["", ".", ".."])
def test_a_folder_is_no_shard(shard: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises((CheckpointError, FileNotFoundError), match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    _, second, third = shards(tmp_path)
    save_file({"a": A, "c": C}, second)
    save_file({"a": A, "b": B}, third)
    assert message(tmp_path).splitlines()[1:] == [
        f"  {second.name}: a is in another file too",
        f"  {third.name}: a is in another file too",
        f"  {third.name}: b is in another file too",
    ]


# Faults of files


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_all_broken_shards_are_listed(suffix: str, tmp_path: Path) -> None:
    sharded(tmp_path, suffix)
    first, second, third = shards(tmp_path)
    cut(first)
    third.write_bytes(b"")
    text = message(tmp_path)
    assert text.startswith(f"{tmp_path} has weights that cannot be read:\n")
    assert [line.partition(":")[0].strip() for line in text.splitlines()[1:]] == [first.name, third.name]
    assert second.name not in text


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
LATER = ENTRY | {"data_offsets": [8, 16]}
BROKEN_SAFETENSORS: dict[str, bytes] = {
    "empty": b"",
    "cut in the length": b"\0\0\0",
    "header longer than the file": (1 << 10).to_bytes(8, "little") + b"{}",
    "header of exabytes": (1 << 62).to_bytes(8, "little") + b"{}",
    "html": b"<!DOCTYPE html><html><body>Not found</body></html>",
}
BROKEN_HEADERS: dict[str, tuple[Any, int]] = {
    "cut": ({"a": ENTRY}, 7),
    "more than its tensors": ({"a": ENTRY}, 9),
    "gap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [9, 17]}}, 17),
    "overlap": ({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, 12),
    "backwards": ({"a": ENTRY | {"data_offsets": [8, 0]}}, 8),
    "other shape": ({"a": ENTRY | {"shape": [3]}}, 8),
    "negative shape": ({"a": ENTRY | {"shape": [-2]}}, 8),
    "huge shape": ({"a": ENTRY | {"shape": [1 << 40, 1 << 40]}}, 8),
    "other dtype": ({"a": ENTRY | {"dtype": "F99"}}, 8),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8),
    "list": ([], 0),
    "numbers": ({"a": 7}, 0),
}
BROKEN_SAFETENSORS |= {
    name: len(text := json.dumps(header).encode()).to_bytes(8, "little") + text + bytes(size)
    for name, (header, size) in BROKEN_HEADERS.items()
}


@pytest.mark.parametrize("fault", BROKEN_SAFETENSORS)
def test_a_broken_safetensors_file_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(BROKEN_SAFETENSORS[fault])
    assert f"\n  {SINGLE}: " in message(tmp_path)


@pytest.mark.parametrize("name", [SINGLE, "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_called_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9000\n")
    assert f"{name}: is a pointer to the file, which git-lfs has not downloaded" in message(tmp_path)


@each_format
def test_a_pickle_that_is_cut_off_anywhere_is_refused_by_name(
    to_file: Callable[[Path, Any], Path], tmp_path: Path
) -> None:
    content = to_file(tmp_path / "x.bin", {"a": randoms((40, 40)), "b": randoms((2,))}).read_bytes()
    ends = (0, 1, 2, 3, 4, 10, 50, 100, 200, 300, 400, 500, 600, len(content) // 2, len(content) - 1)
    for end in ends:
        (tmp_path / "x.bin").write_bytes(content[:end])
        text = message(tmp_path / "x.bin")
        assert "\n  x.bin: torch cannot load it, it may be cut off: " in text or "is no pickle of plain tensors" in text
        assert "weights_only" not in text  # torch's advice, to run whatever is in it


@ignore_protocols
@each_format
def test_damaged_pickles_are_read_or_refused(to_file: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    content = to_file(tmp_path / "x.bin", {"a": randoms((15, 15))}).read_bytes()
    # Legacy files call a storage by its address, other than which they are always the same
    content = re.sub(rb"X....\d{9,}", b"X\7\0\0\0storage", content, flags=re.DOTALL)
    open_checkpoint(write_file(tmp_path / "x.bin", content))
    chance, refused = random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(2):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            open_checkpoint(write_file(tmp_path / "x.bin", damaged))
        except CheckpointError:  # and nothing else
            refused += 1
    assert 20 < refused < 150


@ignore_protocols
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"garbage" * 99, "is no pickle of plain tensors"),
        (b"<html><body>Not found</body></html>", "is no pickle of plain tensors"),
        (pickle.dumps({"a": [1.0]}), "is no pickle of plain tensors"),
        (b"PK\3\4 is no zip file", "torch cannot load it, it may be cut off: RuntimeError"),
    ],
    ids=["garbage", "html", "plain pickle", "no zip"],
)
def test_what_is_no_pickle_of_torch_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert f"\n  pytorch_model.bin: {reason}" in message(tmp_path)


class Evil:
    """Makes a file when it is unpickled by pickle itself."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.file), "w")


def save_plain(file: Path, content: Any) -> Path:
    """Pickles without torch."""
    return write_file(file, pickle.dumps(content))


@ignore_protocols
@pytest.mark.parametrize("to_file", [save, save_legacy, save_plain], ids=["zip", "legacy", "plain"])
def test_a_pickle_with_code_is_refused_and_not_run(to_file: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    file = to_file(tmp_path / "x.bin", {"a": torch.ones(2), "evil": Evil(trace)})
    text = message(file)
    assert "x.bin: is no pickle of plain tensors; " in text
    assert "could run code" in text
    assert "weights_only" not in text  # torch's advice, to run it
    assert not trace.exists()
    pickle.loads(pickle.dumps(Evil(trace))).close()
    assert trace.exists()  # it would have run


@each_format
def test_what_a_pickle_names_beside_tensors_is_said(to_file: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    file = to_file(tmp_path / "x.bin", {"model": {"a": A}, "args": Namespace(lr=0.1)})  # as fairseq saves them
    assert "x.bin: is no pickle of plain tensors; it names argparse.Namespace, " in message(file)


# SHA-256


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_shards_have_the_sha256_of_their_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    content = (tmp_path / INDEX).read_bytes()
    assert open_checkpoint(tmp_path).index_sha256 == sha256(content)
    save_file({"c": C + 1}, shards(tmp_path)[1])
    assert open_checkpoint(tmp_path).index_sha256 == sha256(content)
    (tmp_path / INDEX).write_bytes(content + b"\n")
    assert open_checkpoint(tmp_path).index_sha256 == sha256(content + b"\n") != sha256(content)


def test_a_safetensors_file_has_the_sha256_of_its_header(tmp_path: Path) -> None:
    digests = []
    for weights in ({"a": A}, {"a": B}, {"b": A}, {"a": A.bfloat16()}, {"a": A.T.contiguous()}):
        save_file(weights, tmp_path / SINGLE)
        content = (tmp_path / SINGLE).read_bytes()
        digests.append(open_checkpoint(tmp_path).index_sha256)
        assert digests[-1] == sha256(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert digests[-1] == open_checkpoint(tmp_path / SINGLE).index_sha256
    assert digests[0] == digests[1]  # of what is in the file, not of values
    assert len(set(digests)) == 4


@each_format
def test_a_pickle_has_the_sha256_of_the_file(to_file: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    file = to_file(tmp_path / "x.bin", {"a": torch.zeros(1000, 300)})  # more than a megabyte
    assert open_checkpoint(file).index_sha256 == sha256(file.read_bytes())


def test_tensors_of_any_file_have_the_sha256_of_that_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" * 1000)
    checkpoint = Checkpoint.of_file(TensorsInMemory({"a": A}), tmp_path / "x.gguf")
    assert checkpoint.index_sha256 == sha256(b"GGUF" * 1000)
    assert all_same(values(checkpoint), {"a": A})
