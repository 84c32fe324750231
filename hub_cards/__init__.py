# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Hub folders: create them (`export`), write their cards (`write_card`), `check` them and `push` them."""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from diffllama.hub_cards.checks import check
    from diffllama.hub_cards.findings import Finding
    from diffllama.hub_cards.hub_folder import export, write_card
    from diffllama.hub_cards.upload import push

_MODULES = {
    "Finding": "findings",
    "check": "checks",
    "export": "hub_folder",
    "push": "upload",
    "write_card": "hub_folder",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: most of these import torch and transformers, which takes seconds
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Finding", "check", "export", "push", "write_card"]
