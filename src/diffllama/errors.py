# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The base class of this package's own errors."""


class DiffLlamaError(ValueError):
    """Base class of this package's own errors. Errors of Python and of libraries, such as `FileNotFoundError`, keep
    their classes."""
