# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Hub folders: they are made (`export`), get cards (`write_card`), are checked (`check`) and sent (`push`)."""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from diffllama.hub_cards.checks import check
    from diffllama.hub_cards.findings import Finding
    from diffllama.hub_cards.hub_folder import export, write_card
    from diffllama.hub_cards.upload import push

_HOMES = {
    "Finding": "findings",
    "check": "checks",
    "export": "hub_folder",
    "push": "upload",
    "write_card": "hub_folder",
}


def __getattr__(name: str) -> Any:
    # Not imported at once: the command line imports `findings` to check its arguments, and needs no torch for that
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Finding", "check", "export", "push", "write_card"]
