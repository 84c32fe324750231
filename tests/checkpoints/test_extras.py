"""Error messages for missing packages of an extra."""

import pytest

from diffllama.checkpoints.extras import needs


def test_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError) as raised, needs("eval"):
        import no_such_package  # noqa: F401 # it fails
    assert str(raised.value) == ("No module named 'no_such_package'. In a clone of diffllama: pip install '.[eval]'")


def test_other_errors_are_as_they_were() -> None:
    with pytest.raises(ImportError, match="cannot import name"), needs("eval"):
        from os import no_such_name  # noqa: F401 # it fails
