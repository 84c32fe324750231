# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports of optional dependencies."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Name the extra to install if an import in the block fails.

    Args:
        extra: name in `pip install '.[NAME]'`, in a clone of this package.

    Raises:
        ModuleNotFoundError: a package is missing; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}. In a clone of diffllama: pip install '.[{extra}]'") from error
