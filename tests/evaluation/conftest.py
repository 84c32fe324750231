"""Settings for the tests of evaluation."""

import pytest

from diffllama.evaluation.probes.model_pair import SMALL


@pytest.fixture(autouse=True)
def tiny_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the small pair of models by a tiny one."""
    for field, value in {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}.items():
        monkeypatch.setitem(SMALL, field, value)
