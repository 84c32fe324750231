"""Settings for all tests: no network, few threads, quiet libraries."""

import gc
import importlib.util
import os
from collections.abc import Iterator


os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OMP_NUM_THREADS"] = "1"  # tests run in parallel processes; before torch is imported

import pytest
import torch

from support.fake_hub import Hub


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU: before triton is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def less_garbage() -> Iterator[None]:
    """Exclude imported objects from garbage collection during training, where it takes most of the time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def static_shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile flex_attention for each shape.

    After several shapes torch would compile for dynamic shapes, and that C++ does not always compile on the CPU
    (torch 2.13: `cur_kvSplitSize2` was not declared).
    """
    if "flex_attention" not in request.node.name:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty fake Hub for client processes, which fails the test after an unknown request."""
    with Hub() as hub:
        yield hub
    assert [request for request in hub.requests if request.status == 501] == []


@pytest.fixture
def patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch triton.language once. The interpreter patches it for each call in a kernel, which takes much time."""
    if importlib.util.find_spec("triton") and not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpretedFunction

        call, patched = InterpretedFunction.__call__, set()

        def call_patched_once(self: InterpretedFunction, *given: object, **options: object) -> object:
            names = id(self.fn.__globals__)
            if names in patched:
                return self.rewrite()(*given, **options)
            patched.add(names)
            return call(self, *given, **options)

        monkeypatch.setattr(InterpretedFunction, "__call__", call_patched_once)
