"""Shards contain the planned tensors, and transformers reads them."""

import gc
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.options import shard_size
from diffllama.checkpoints.reading import Checkpoint, TensorInMemory, fingerprint, open_checkpoint
from diffllama.checkpoints.tensor_values import DTYPES
from diffllama.checkpoints.writing import Step, write_shards
from diffllama.conversion.weight_map import Rule, plan
from support.llama_checkpoints import llama
from support.tiny_models import tiny_config
from support.weight_files import (
    SINGLE,
    A,
    all_same,
    as_they_are,
    in_memory,
    only_linux,
    randoms,
    read_shards,
    values,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tensors=st.dictionaries(
        # JSON cannot encode lone surrogates, and safetensors reserves one name
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    max_shard_size=st.sampled_from(["5GB", 200, 1]),
)
def test_written_tensors_are_read_bit_for_bit(
    tensors: dict[str, tuple[torch.dtype, list[int]]], max_shard_size: int | str
) -> None:
    weights = {name: randoms(tuple(shape), dtype, i) for i, (name, (dtype, shape)) in enumerate(tensors.items())}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        written = write_shards(root, as_they_are(in_memory(weights)), in_memory(weights), max_shard_size)
        assert written == fingerprint(open_checkpoint(root))
        assert all_same(read_shards(root), weights)
        assert all_same(values(open_checkpoint(root)), weights)
        for file in root.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}


def test_views_and_shared_memory_are_written_as_what_they_show(tmp_path: Path) -> None:
    whole = torch.arange(9.0)
    weights = {
        "whole": whole,
        "again": whole,
        "part": whole[2:5],
        "every second": whole[1::2],
        "transposed": whole.view(3, 3).T,
        "expanded": whole.expand(2, 9),
        "parameter": torch.nn.Parameter(whole),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    }
    write_shards(tmp_path, as_they_are(in_memory(weights)), in_memory(weights))
    written = load_file(tmp_path / SINGLE)
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())


def test_single_file_has_its_name_no_index_and_the_usual_permissions(tmp_path: Path) -> None:
    write_shards(tmp_path, as_they_are(in_memory({"a": A})), in_memory({"a": A}), stem="attention")
    assert [file.name for file in tmp_path.iterdir()] == ["attention.safetensors"]
    (tmp_path / "other").touch()
    assert (tmp_path / "attention.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


@only_linux
def test_disk_that_is_full_is_an_error(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint = in_memory({"a": torch.ones(500)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors cannot be written: .*File too large"):
            write_shards(tmp_path, as_they_are(checkpoint), checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_transformers_loads_the_shards(tmp_path: Path) -> None:
    source, folder = llama(tmp_path / "src"), tmp_path / "dest"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    checkpoint = open_checkpoint(source)
    write_shards(folder, as_they_are(checkpoint), checkpoint, "60KB")
    files = list(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 60_000 + 2000 for file in files)  # and the header
    loaded, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert all_same(loaded.state_dict(), LlamaForCausalLM.from_pretrained(source).state_dict())


@pytest.mark.parametrize("max_shard_size", ["5GB", 50])
def test_progress_counts_bytes_up_to_their_total(max_shard_size: int | str, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    weights = {"a": randoms((3,), torch.float64), "b": randoms(()), "none": randoms((0,)), "c": randoms((9, 2))}
    checkpoint = in_memory(weights)
    write_shards(
        tmp_path, as_they_are(checkpoint), checkpoint, max_shard_size, progress=lambda *count: calls.append(count)
    )
    done = [count for count, _ in calls]
    assert {total for _, total in calls} == {24 + 4 + 72}
    assert 3 <= len(done) <= len(weights)
    assert (done[-1], done) == (24 + 4 + 72, sorted(done))


def test_one_shard_and_one_tensor_are_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref] = []
    counts = []

    def born(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(tensor))
        counts.append(sum(reference() is not None for reference in alive))
        return tensor

    class Source(TensorInMemory):
        def read(self) -> torch.Tensor:
            return born(super().read().clone())

    checkpoint = Checkpoint({f"{i}": Source(torch.ones(5, 3), Path()) for i in range(10)}, "")
    steps = {
        name: Step((name,), lambda tensor: born(tensor * 2), torch.empty(5, 3, device="meta"))
        for name in checkpoint.tensors
    }
    gc.disable()  # reference counting must suffice
    try:
        write_shards(tmp_path, steps, checkpoint, max_shard_size=150)
    finally:
        gc.enable()
    assert counts == [1, 2, 2, 3] * 5  # the tensor read and the tensor made of it, two tensors per shard
    assert len(read_shards(tmp_path)) == 10


def test_nonfinite_weights_are_not_written_and_all_of_them_are_named(tmp_path: Path) -> None:
    weights = {name: torch.ones(2, 3) for name in "abc"}
    weights["a"][1, 2], weights["c"][0, 0] = torch.nan, torch.inf
    torch.save(weights, tmp_path / "x.bin")
    checkpoint = open_checkpoint(tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"NaN or infinite values .*:\n  x\.bin: a\n  x\.bin: c$"):
        write_shards(tmp_path, as_they_are(checkpoint), checkpoint)


def test_tensor_that_overflows_is_named_with_its_source(tmp_path: Path) -> None:
    checkpoint, narrow = (in_memory({"a": torch.tensor([40_000.0], dtype=d)}) for d in (torch.float32, torch.float16))
    rule = Rule("b", (lambda tensor, config: tensor * 2,))
    for source, dtype in ((checkpoint, torch.bfloat16), (checkpoint, torch.float32), (narrow, torch.bfloat16)):
        write_shards(tmp_path, plan(source.tensors, {"a": rule}, tiny_config(), dtype), source)
        assert load_file(tmp_path / SINGLE)["b"].item() == torch.tensor(80_000.0, dtype=dtype).item()
    message = r"^b becomes infinite: the largest float16 is 65504, and .* a is larger\. .* such as bfloat16"
    with pytest.raises(CheckpointError, match=message):
        write_shards(tmp_path, plan(checkpoint.tensors, {"a": rule}, tiny_config(), torch.float16), checkpoint)


@pytest.mark.parametrize(("size", "expected"), [(60_000, 60_000), ("60000", 60_000), ("60KB", "60KB")])
def test_size_of_shards_is_bytes_or_a_text_with_a_unit(size: int | str, expected: int | str) -> None:
    assert shard_size(size) == expected


@pytest.mark.parametrize("size", ["0", "0GB", "-5GB", "5 apples", -1])
def test_size_that_is_none_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"`max_shard_size` must be a number of bytes or a text like '5GB', got"):
        shard_size(size)
