"""Settings for all tests: no network, few threads, quiet libraries."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


torch.set_num_threads(1)  # tests run in parallel processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
