# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""This package's version, commit and licence, and the versions of its libraries."""

import json
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from diffllama import modeling_diff


VERSION = version("diffllama")

PACKAGE_URL = ""
"""URL of the package. While it is empty, cards and messages have no link, and name no package index, where anybody
could register the name."""

SOURCE = Path(modeling_diff.__file__).parent
"""Folder of the package with the code of Hub folders."""


@cache
def commit() -> str | None:
    """Return the commit of the package if it is known: from the clone, or as recorded in the built package."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", SOURCE, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("ls-files", "."):
            return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        pass  # no git, or no clone
    noted = SOURCE.parent / "_commit.txt"
    if noted.is_file():
        return noted.read_text(encoding="utf-8").strip()
    try:
        origin = json.loads(distribution("diffllama").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None
    return origin.get("vcs_info", {}).get("commit_id")


@cache
def licence() -> str:
    """Return the text of the licence of our code."""
    clone = SOURCE.parent / "LICENSE"
    if clone.is_file():
        return clone.read_text(encoding="utf-8")
    text = distribution("diffllama").read_text("licenses/LICENSE")
    if text is None:
        raise FileNotFoundError("The installed diffllama has no LICENSE. Install it again.")
    return text


def is_code_licence(path: Path) -> bool:
    """Whether a file is the licence of our code, whatever its name."""
    return path.name.startswith("LICENSE") and path.read_bytes().decode(errors="replace").split() == licence().split()


def versions() -> dict[str, str | None]:
    """Return the versions of this package, its commit, torch, transformers and Python."""
    return {
        "diffllama": VERSION,
        "commit": commit(),
        **{library: version(library) for library in ("torch", "transformers")},
        "python": platform.python_version(),
    }
