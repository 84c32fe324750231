"""The package's own errors have one base class."""

import pytest

import diffllama
from diffllama.checkpoints.errors import CheckpointError, VerificationError
from diffllama.hub_cards.findings import FolderError


@pytest.mark.parametrize("error", [CheckpointError, FolderError, VerificationError])
def test_own_errors_are_caught_by_one_base_class(error: type[Exception]) -> None:
    assert issubclass(error, diffllama.DiffLlamaError)
