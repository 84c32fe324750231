# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""This package's own errors."""

from collections.abc import Iterable


class DiffLlamaError(ValueError):
    """Base class of this package's errors. Errors of Python and of libraries, such as `FileNotFoundError`, keep their
    classes."""


class CheckpointError(DiffLlamaError):
    """Files or tensors of a checkpoint are wrong. The message lists all of them, one per line."""


class VerificationError(DiffLlamaError):
    """A converted model does not compute what its source computes."""


def lines(title: str, items: Iterable[str]) -> str:
    """Format a message with one line for each item."""
    return "\n  ".join((f"{title}:", *items))
