# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Local paths in texts and JSON files, which must not be published."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any


LOCAL_PATH = re.compile(
    r"(?<![\w/.])/(?:home|Users|Volumes|root|tmp|mnt|media|scratch|workspace|content/drive|kaggle)/[\w.-]|file:///"
    r"|(?<![A-Za-z])[A-Za-z]:[\\/]+(?:Users|home)[\\/]"
)
"""The beginning of a local path within a text."""

ROOTS = re.compile(
    r"cluster|content|data(?:sets?|\d+)?|dev|efs|etc|fsx|gpfs|home|kaggle|lustre|media|mnt|net|nfs|opt|private|projects?|"
    r"root|scratch|shared|srv|storage|tmp|Users|usr|var|Volumes|work(?:space)?"
)
"""Top-level folders of operating systems. Other absolute paths may be parts of URLs, such as /v1/chat/completions."""

PATH_FIELDS = re.compile(r"(?i)(?:path|file|dir|folder)$")
"""Names of JSON fields whose values are paths."""


def is_local_path(value: Any, field: str = "") -> bool:
    """Whether a value is an absolute local path and nothing else. `field` is the name of its JSON field, if any."""
    if not isinstance(value, str) or "\n" in value or not 3 < len(value) < 4096:
        return False
    windows, posix = PureWindowsPath(value), PurePosixPath(value)
    if windows.drive and windows.root:
        return True
    is_path = posix.is_absolute() and len(posix.parts) > 2
    return is_path and bool(ROOTS.fullmatch(posix.parts[1]) or PATH_FIELDS.search(field))


def contains_local_path(value: Any, field: str = "") -> bool:
    """Whether a value is a text that contains a local path. `field` is the name of its JSON field, if any."""
    return isinstance(value, str) and (is_local_path(value, field) or LOCAL_PATH.search(value) is not None)


def strip_local_paths(content: Any) -> Any:
    """Return a JSON value without the fields whose value is a local path."""
    if isinstance(content, dict):
        return {name: strip_local_paths(value) for name, value in content.items() if not is_local_path(value, name)}
    return [strip_local_paths(value) for value in content] if isinstance(content, list) else content


def json_strings(content: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a JSON value, each with its place, such as `layers[0].name`."""
    if isinstance(content, str):
        yield where, content
    elif isinstance(content, dict):
        for name, value in content.items():
            yield from json_strings(value, f"{where}.{name}" if where else name)
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from json_strings(value, f"{where}[{i}]")


def json_words(content: Any) -> Iterator[str]:
    """Yield the texts in a JSON value and the names of its fields."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from content
        yield from json_words(list(content.values()))
    elif isinstance(content, list):
        for value in content:
            yield from json_words(value)
