# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The paper's experiments: one module with one class for each."""

import importlib
from typing import TYPE_CHECKING, Any

from diffllama.evaluation.settings import PROBES


if TYPE_CHECKING:
    from diffllama.evaluation.runs import Probe


def probe_class(command: str) -> "type[Probe[Any]]":
    """Return the class of a command of `diffllama probe`, from the module named like the command."""
    module = importlib.import_module(f"diffllama.evaluation.probes.{command.replace('-', '_')}")
    return getattr(module, PROBES[command].__name__.removesuffix("Settings"))
