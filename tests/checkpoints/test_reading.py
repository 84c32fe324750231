"""Checkpoints are read, or refused with a message that names the fault."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.reading import (
    Checkpoint,
    TensorInSafetensors,
    fingerprint,
    nonfinite_tensors,
    open_checkpoint,
)
from diffllama.checkpoints.tensor_values import DTYPES, PIECE, is_finite
from support.llama_checkpoints import snapshot
from support.weight_files import (
    FORMATS,
    INDEX,
    SINGLE,
    A,
    B,
    C,
    all_same,
    cut,
    message,
    only_linux,
    randoms,
    sharded,
    shards,
    values,
)


def test_weights_are_preferred_as_transformers_prefers_them(tmp_path: Path) -> None:
    weights: dict[str, torch.Tensor] = {}
    for prepare in (
        lambda: sharded(tmp_path, "bin"),
        lambda: save_weights(tmp_path / "pytorch_model.bin"),
        lambda: sharded(tmp_path, "safetensors"),
        lambda: save_weights(tmp_path / SINGLE),
    ):
        weights = prepare()
        assert all_same(values(open_checkpoint(tmp_path)), weights)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.drop("b")
    assert list(values(checkpoint)) == ["a"]


def save_weights(file: Path) -> dict[str, torch.Tensor]:
    weights = {"a": randoms((2, 3)), "b": randoms((), torch.bfloat16)}
    (save_file if file.suffix == ".safetensors" else torch.save)(weights, file)
    return weights


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin", "x.pt", "x.pth"])
def test_single_file_is_read_whatever_its_name(name: str, tmp_path: Path) -> None:
    weights = save_weights(tmp_path / name)
    checkpoint = open_checkpoint(tmp_path / name)
    assert all(tensor.is_meta for tensor in checkpoint.tensors.values())
    assert all_same(values(checkpoint), weights)
    assert all(checkpoint.tensors[name].shape == weights[name].shape for name in weights)
    assert all(checkpoint.tensors[name].dtype == weights[name].dtype for name in weights)


def test_other_tensors_of_a_safetensors_file_are_all_refused_by_name(tmp_path: Path) -> None:
    dtypes = {"I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn}
    save_file({name: torch.ones(2).to(dtype) for name, dtype in dtypes.items()} | {"a": A}, tmp_path / SINGLE)
    text = message(tmp_path)
    assert f"has tensors whose dtype is not one of {', '.join(DTYPES)}: " in text
    assert all(f"{name} is {name}" in text for name in dtypes)
    assert "a is F32" not in text


@only_linux
@pytest.mark.parametrize("kind", ["safetensors", "shards", "zip", "legacy", "pickled shards"])
def test_reading_leaves_the_source_as_it_is_and_nothing_open(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
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
    assert all(torch.equal(torch.cat([*checkpoint.pieces(name)]), tensors[name].reshape(-1)) for name in tensors)
    tensors["a"].mul_(2)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert snapshot(source) == before


@pytest.mark.parametrize("left", [0, 5, "all but one byte"])
def test_source_that_becomes_shorter_is_an_error(left: int | str, tmp_path: Path) -> None:
    save_file({name: randoms((3, 5), dtype) for name, dtype in DTYPES.items()}, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(tmp_path / SINGLE, left if isinstance(left, int) else (tmp_path / SINGLE).stat().st_size - 1)
    last = max(checkpoint.homes, key=lambda name: checkpoint.homes[name].start)
    with pytest.raises(OSError, match=r"model\.safetensors was truncated"):
        list(checkpoint.pieces(last))
    with pytest.raises(OSError, match=r"model\.safetensors changed while it was read"):
        checkpoint.read(last)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": A}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path.name} has no weights: neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    first, _, last = shards(tmp_path)
    first.unlink()
    last.unlink()
    last.mkdir()
    with pytest.raises(FileNotFoundError, match=rf"index\.json names .* not exist: {first.name}, {last.name}\."):
        open_checkpoint(tmp_path)


NO_INDICES = ("", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 7}}', '{"weight_map": {"a": ["x"]}}')
BROKEN_INDICES = {
    **dict.fromkeys((*NO_INDICES, '{"weight_map": {"a": null, "b": "x.safetensors"}}'), "is not an index of shards"),
    "\xff\xfe\xfd": "is not an index of shards",
    '{"weight_map": {}}': r"must name files of its own folder, got \[\]",
    **{
        json.dumps({"weight_map": {"a": "x.safetensors", "b": shard}}): rf"of its own folder, got .*{shard}"
        for shard in ("../x.safetensors", "sub/x.safetensors", "/etc/passwd")
    },
    **{json.dumps({"weight_map": {"a": folder}}): r"index\.json" for folder in ("", ".", "..")},
}
"""Content -> message."""


@pytest.mark.parametrize("content", BROKEN_INDICES)
def test_index_that_does_not_name_files_of_its_folder_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "src" / "sub").mkdir(parents=True)
    for place in (tmp_path, tmp_path / "src", tmp_path / "src" / "sub"):
        save_file({"a": A}, place / "x.safetensors")
    (tmp_path / "src" / INDEX).write_text(content, encoding="latin-1")
    with pytest.raises((CheckpointError, FileNotFoundError), match=BROKEN_INDICES[content]):
        open_checkpoint(tmp_path / "src")


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    _, second, third = shards(tmp_path)
    save_file({"a": A, "c": C}, second)
    save_file({"a": A, "b": B}, third)
    assert message(tmp_path).splitlines()[1:] == [
        f"  {second.name}: a is in another file too",
        f"  {third.name}: a is in another file too",
        f"  {third.name}: b is in another file too",
    ]


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


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda sound: b"",
    "header of exabytes": lambda sound: (1 << 62).to_bytes(8, "little") + sound[8:],
    "header that is a list": lambda sound: (2).to_bytes(8, "little") + b"[]",
    "html": lambda sound: b"<!DOCTYPE html><html><body>Not found</body></html>",
    "cut": lambda sound: sound[:-1],
    "longer than its tensors": lambda sound: sound + b"\0",
    "other shape": lambda sound: sound.replace(b"[2,3]", b"[2,4]"),
    "other dtype": lambda sound: sound.replace(b"F32", b"F99"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_safetensors_file_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / SINGLE)
    sound = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(BROKEN[fault](sound))
    assert BROKEN[fault](sound) != sound
    assert f"\n  {SINGLE}: " in message(tmp_path)


@pytest.mark.parametrize("name", [SINGLE, "pytorch_model.bin"])
def test_pointer_of_git_lfs_is_called_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9000\n")
    assert f"{name}: is a git-lfs pointer" in message(tmp_path)


# SHA-256


def test_sha256_is_that_of_an_index_a_header_or_else_the_file(tmp_path: Path) -> None:
    def expect(place: Path, content: bytes) -> None:
        assert open_checkpoint(place).index_sha256 == hashlib.sha256(content).hexdigest()

    sharded(tmp_path)
    content = (tmp_path / INDEX).read_bytes()
    expect(tmp_path, content)
    save_file({"c": C + 1}, shards(tmp_path)[1])
    expect(tmp_path, content)
    (tmp_path / INDEX).write_bytes(content + b"\n")
    expect(tmp_path, content + b"\n")

    for weights in ({"a": A}, {"a": B}, {"b": A}, {"a": A.bfloat16()}, {"a": A.T.contiguous()}):
        save_file(weights, tmp_path / SINGLE)
        content = (tmp_path / SINGLE).read_bytes()
        for place in (tmp_path, tmp_path / SINGLE):
            expect(place, content[8 : 8 + int.from_bytes(content[:8], "little")])

    for to_file in FORMATS.values():
        file = to_file(tmp_path / "x.bin", {"a": torch.zeros(1000, 300)})  # longer than one read of 1 MB
        expect(file, file.read_bytes())

    (tmp_path / "x.gguf").write_bytes(b"GGUF" * 1000)
    checkpoint = Checkpoint.in_memory({"a": A}, tmp_path / "x.gguf")
    assert checkpoint.index_sha256 == hashlib.sha256(b"GGUF" * 1000).hexdigest()
    assert all_same(values(checkpoint), {"a": A})


# Values


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_value_that_is_no_number_is_seen_wherever_it_is(value: float, dtype: torch.dtype) -> None:
    for size in (1, 7, 100):
        values = randoms((size,), dtype)
        assert is_finite(values)
        for i in range(size):
            assert not is_finite(values.where(torch.arange(size) != i, value))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_nonfinite_tensors_are_named_with_their_files(suffix: str, tmp_path: Path) -> None:
    weights = sharded(tmp_path, suffix)
    assert nonfinite_tensors(open_checkpoint(tmp_path)) == {}
    first, second, _ = shards(tmp_path)
    write = save_file if suffix == "safetensors" else torch.save
    a, long = weights["a"].clone(), torch.zeros(2, PIECE)
    a[2, 0], long[1, -1] = torch.nan, -torch.inf
    write({"a": a, "b": weights["b"]}, first)
    write({"c": long, "none": torch.ones(0)}, second)
    assert nonfinite_tensors(open_checkpoint(tmp_path)) == {"a": first.name, "c": second.name}


class TestFingerprint:
    def of(self, weights: dict[str, torch.Tensor], folder: Path) -> str:
        save_file(weights, folder / SINGLE)
        return fingerprint(open_checkpoint(folder))

    def test_every_value_counts(self, tmp_path: Path) -> None:
        weights = {"a": torch.zeros(2 * PIECE + 3), "b": torch.zeros(2, 2)}
        prints = {self.of(weights, tmp_path)}
        for name, i in (("a", 0), ("a", PIECE), ("a", -1), ("b", -1)):
            changed = {key: tensor.clone() for key, tensor in weights.items()}
            changed[name].view(-1)[i] = 1e-30
            prints.add(self.of(changed, tmp_path))
        assert len(prints) == 5

    def test_names_and_shapes_count(self, tmp_path: Path) -> None:
        a, b = torch.arange(6.0), torch.ones(2)
        different = ({"a": a, "b": b}, {"b": a, "a": b}, {"a": a}, {"a": a.view(2, 3), "b": b}, {"a": a, "c": b})
        assert len({self.of(weights, tmp_path) for weights in different}) == 5

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_cast_that_changes_no_value_does_not_count(self, dtype: torch.dtype, tmp_path: Path) -> None:
        narrow = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert self.of({"a": narrow}, tmp_path) == self.of({"a": narrow.float()}, tmp_path)
        wide = narrow.float() * (1 + 1e-6)
        assert self.of({"a": wide.to(dtype)}, tmp_path) != self.of({"a": wide}, tmp_path)

    def test_files_do_not_count(self, tmp_path: Path) -> None:
        weights = sharded(tmp_path)
        in_shards = fingerprint(open_checkpoint(tmp_path))
        torch.save(weights, tmp_path / "x.bin")
        assert fingerprint(open_checkpoint(tmp_path / "x.bin")) == in_shards == self.of(weights, tmp_path)

    def test_no_tensor_is_in_memory_as_a_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TensorInSafetensors, "read", lambda *_: pytest.fail("a whole tensor was read"))
        self.of({"a": torch.zeros(3 * PIECE)}, tmp_path)
        assert [len(piece) for piece in open_checkpoint(tmp_path).pieces("a")] == [PIECE] * 3
