# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What not everybody installs: the package's extras."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Imports of packages that come with an extra.

    Args:
        extra: its name in `pip install '.[NAME]'`, in a clone of this package.

    Raises:
        ModuleNotFoundError: one is missing; says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}. In a clone of diffllama: pip install '.[{extra}]'") from error
