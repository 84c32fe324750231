"""Fixtures of the benchmarks' tests."""

from typing import Any

import pytest
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Attention functions by name, which a test may replace. Ours are timed under sdpa and fused."""
    found = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr("benchmarks.implementations.OURS", ("sdpa", "fused"))
    monkeypatch.setattr(AttentionInterface, "_global_mapping", found)
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})  # other tests leave restored entries there
    return found
