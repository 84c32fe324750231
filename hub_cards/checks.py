# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a folder is fit for the Hub. No code in it is run."""

import os
from collections.abc import Sequence
from pathlib import Path

from diffllama.hub_cards.findings import RULES, Finding, FolderError, allowed, check_arguments, errors
from diffllama.hub_cards.limits import Inspection, inspect_with_limits


__all__ = ["RULES", "Finding", "FolderError", "check", "check_code", "errors"]


def check(folder: str | os.PathLike[str], *, allow: Sequence[str] = ()) -> list[Finding]:
    """What is wrong with a folder that is to be published, and what is good to know about it.

    A model folder consists of known files; any other is wrong. Every file is what its name says and loads, by what is
    installed here and never by the folder's own code; the code is the package's; the weights are those that the
    configuration asks for, and finite; there are no pickles, secrets, or paths of a machine. All of it is read in a
    process of its own, with limits of time and memory.

    Args:
        folder: the folder, with a model of ours.
        allow: findings to take for notes, FILE:RULE each, as a finding's text begins. FILE may be a pattern.

    Returns:
        The findings; `severity` tells which are wrong.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: an entry of `allow` is no FILE:RULE.
        FolderError: an entry of `allow` matches nothing.
    """
    check_arguments(folder, allow)
    from diffllama.hub_cards.inspection import inspect  # takes seconds to import

    return run(inspect, folder, allow)


def check_code(folder: str | os.PathLike[str], *, allow: Sequence[str] = ()) -> list[Finding]:
    """What `check` says of a folder's code alone."""
    check_arguments(folder, allow)
    from diffllama.hub_cards.inspection import inspect_code

    return run(inspect_code, folder, allow)


def run(inspect: Inspection, folder: str | os.PathLike[str], allow: Sequence[str]) -> list[Finding]:
    """The findings of an inspection, each once."""
    findings = inspect_with_limits(inspect, Path(os.path.abspath(folder)))
    return allowed(dict.fromkeys(findings), allow)
