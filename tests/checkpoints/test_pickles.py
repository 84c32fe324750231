"""Pickled state dicts are read without running code."""

import pickle
import random
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.reading import open_checkpoint
from diffllama.checkpoints.tensor_values import DTYPES
from support.weight_files import (
    A,
    B,
    C,
    all_same,
    each_format,
    ignore_protocols,
    message,
    randoms,
    save,
    save_legacy,
    values,
    write_file,
)


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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model": {"a": A, "b": B}, "optimizer": {"lr": 0.1}, "step": 7}, {"a": A, "b": B}),
        ({"model": {"state_dict": {"a": A}}, "epoch": 3}, {"a": A}),
        ([{"a": A}, {"a": B}], {"0.a": A, "1.a": B}),
        (({"a": A}, {"a": B}), {"0.a": A, "1.a": B}),
        ({"layers": [{0: {"a": A}}, [B, C]]}, {"layers.0.0.a": A, "layers.1.0": B, "layers.1.1": C}),
        ({"model": A, "b": B}, {"model": A, "b": B}),
        ({"model": [{"a": A}]}, {"model.0.a": A}),
    ],
    ids=["model", "both", "list", "tuple", "nested", "tensor", "list of model"],
)
def test_nested_state_dicts_become_one_with_dotted_names(
    content: Any, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert all_same(values(open_checkpoint(save(tmp_path / "x.bin", content))), expected)


LOOP: list[Any] = [A]
LOOP.append(LOOP)
NO_WEIGHTS: dict[str, Any] = {
    "step is int": {"a": A, "step": 7},
    "layers.1.name is str": {"a": A, "layers": [{"x": A}, {"name": "q"}]},
    "a.b is NoneType": {"a": {"b": None}},
    "a is torch.int64, not a tensor of floating-point numbers": {"a": torch.arange(3)},
    "a is torch.bool": {"a": torch.ones(3, dtype=torch.bool)},
    "a is torch.complex64": {"a": torch.ones(3, dtype=torch.complex64)},
    "a is torch.float8_e4m3fn": {"a": torch.ones(3).to(torch.float8_e4m3fn)},
    "a is torch.sparse_coo, not a dense tensor": {"a": torch.eye(3).to_sparse()},
    "a is without values": {"a": torch.empty(3, device="meta")},
    "two tensors have the name a.b": {"a.b": A, "a": {"b": B}},
    "two tensors have the name 0": {0: A, "0": B},
    "it is str": "weights",
    "maximum recursion depth": LOOP,
    "contains argparse.Namespace; only tensors are loaded": {"model": {"a": A}, "args": Namespace(lr=0.1)},  # fairseq
}
"""Message -> what is in the pickle."""


@pytest.mark.parametrize("fault", NO_WEIGHTS)
def test_other_content_than_floating_point_tensors_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    assert f"x.bin: {fault}" in message(save(tmp_path / "x.bin", NO_WEIGHTS[fault]))


@each_format
def test_pickle_that_is_cut_off_anywhere_is_refused_by_name(
    to_file: Callable[[Path, Any], Path], tmp_path: Path
) -> None:
    content = to_file(tmp_path / "x.bin", {"a": randoms((40, 40)), "b": randoms((2,))}).read_bytes()
    ends = (0, 1, 2, 3, 4, 10, 50, 100, 200, 300, 400, 500, 600, len(content) // 2, len(content) - 1)
    for end in ends:
        (tmp_path / "x.bin").write_bytes(content[:end])
        text = message(tmp_path / "x.bin")
        assert "\n  x.bin: torch cannot load it; it may be truncated: " in text or "only tensors are loaded" in text
        assert "weights_only" not in text  # torch's advice would run the pickle's code


@ignore_protocols
@each_format
def test_damaged_pickles_are_read_or_refused(to_file: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    content = to_file(tmp_path / "x.bin", {"a": randoms((15, 15))}).read_bytes()
    # Legacy files name a storage by its address; replaced, files are reproducible
    content = re.sub(rb"X....\d{9,}", b"X\7\0\0\0storage", content, flags=re.DOTALL)
    open_checkpoint(write_file(tmp_path / "x.bin", content))
    chance, refused = random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(2):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            open_checkpoint(write_file(tmp_path / "x.bin", damaged))
        except CheckpointError:  # and no other exception
            refused += 1
    assert 20 < refused < 150


@ignore_protocols
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"garbage" * 99, "is not a pickle of tensors"),
        (b"<html><body>Not found</body></html>", "is not a pickle of tensors"),
        (pickle.dumps({"a": [1.0]}), "is not a pickle of tensors"),
        (b"PK\3\4 is no zip file", "torch cannot load it; it may be truncated: RuntimeError"),
    ],
    ids=["garbage", "html", "plain pickle", "no zip"],
)
def test_other_file_than_a_pickle_of_torch_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert f"\n  pytorch_model.bin: {reason}" in message(tmp_path)


class Evil:
    """Creates a file when pickle loads it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.file), "w")


def save_plain(file: Path, content: Any) -> Path:
    """Pickle an object without torch."""
    return write_file(file, pickle.dumps(content))


@ignore_protocols
@pytest.mark.parametrize("to_file", [save, save_legacy, save_plain], ids=["zip", "legacy", "plain"])
def test_pickle_with_code_is_refused_and_not_run(to_file: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    file = to_file(tmp_path / "x.bin", {"a": torch.ones(2), "evil": Evil(trace)})
    text = message(file)
    assert "; only tensors are loaded, because unpickling can execute code" in text
    assert "weights_only" not in text  # torch's advice would run it
    assert not trace.exists()
    pickle.loads(pickle.dumps(Evil(trace))).close()
    assert trace.exists()  # pickle itself runs it
