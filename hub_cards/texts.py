# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What the text in a folder's files is, and what must not be in it."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any


PLACES = re.compile(
    r"(?<![\w/.])/(?:home|Users|Volumes|root|tmp|mnt|media|scratch|workspace|content/drive|kaggle)/[\w.-]|file:///"
    r"|(?<![A-Za-z])[A-Za-z]:[\\/]+(?:Users|home)[\\/]"
)
"""Beginnings of paths on somebody's machine, within a text."""

ROOTS = re.compile(
    r"cluster|content|data(?:sets?|\d+)?|dev|efs|etc|fsx|gpfs|home|kaggle|lustre|media|mnt|net|nfs|opt|private|projects?|"
    r"root|scratch|shared|srv|storage|tmp|Users|usr|var|Volumes|work(?:space)?"
)
"""Top folders of machines: a path from another one may be that of a URL, such as /v1/chat/completions."""

PATH_NAMES = re.compile(r"(?i)(?:path|file|dir|folder)$")
"""Names of JSON fields whose values are paths."""


def strings(content: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """All texts in a JSON value, and where they stand."""
    if isinstance(content, str):
        yield where, content
    elif isinstance(content, dict):
        for name, value in content.items():
            yield from strings(value, f"{where}.{name}".removeprefix("."))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from strings(value, f"{where}[{i}]")


def words(content: Any) -> Iterator[str]:
    """All texts in a JSON value, and the names of its fields."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from content
        yield from words(list(content.values()))
    elif isinstance(content, list):
        for value in content:
            yield from words(value)


def forget_places(content: Any) -> Any:
    """A JSON value without the fields that hold nothing but a path of a machine."""
    if isinstance(content, dict):
        return {name: forget_places(value) for name, value in content.items() if not is_absolute_path(value, name)}
    return [forget_places(value) for value in content] if isinstance(content, list) else content


def is_absolute_path(value: Any, name: str = "") -> bool:
    """Whether a value is nothing but an absolute path on a machine; `name` is that of its field, if it has one."""
    if not isinstance(value, str) or "\n" in value or not 3 < len(value) < 4096:
        return False
    windows, posix = PureWindowsPath(value), PurePosixPath(value)
    if windows.drive and windows.root:
        return True
    is_path = posix.is_absolute() and len(posix.parts) > 2
    return is_path and bool(ROOTS.fullmatch(posix.parts[1]) or PATH_NAMES.search(name))


def has_place(value: Any, name: str = "") -> bool:
    """Whether a value is a text with a path of a machine in it; `name` is that of its field, if it has one."""
    return isinstance(value, str) and (is_absolute_path(value, name) or PLACES.search(value) is not None)
