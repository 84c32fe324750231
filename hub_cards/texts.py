# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What the text in a folder's files is, and what must not be in it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any


SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": r"\bxox[abprs]-[0-9A-Za-z-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
"""What secrets look like that must not be published."""

SECRET_NAMES = re.compile(r"(?i)(?:(?:hub|hf|auth|access|api)_?token|api_?key|secret(?:_?key)?|password|passwd)$")
"""Names of JSON fields whose values are secrets."""

PLACES = re.compile(
    r"(?<![\w/.:])(?:/(?:home|Users|root|tmp|mnt|media|scratch|workspace|var)/[\w.-]|[A-Za-z]:\\[\w.-])"
)
"""Beginnings of paths on somebody's machine, within a text."""


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises `ValueError` with the file's name if it is none."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(content).__name__}.")
    return content


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


def secrets(text: str) -> list[str]:
    """The secrets in a text, by what they are and how they begin."""
    found = ((what, re.search(pattern, text)) for what, pattern in SECRETS.items())
    return [f"{what} ({match[0][:6]}…)" for what, match in found if match]


def is_absolute_path(value: Any) -> bool:
    """Whether a value is nothing but an absolute path of more than one part."""
    if not isinstance(value, str) or "\n" in value or not 3 < len(value) < 4096:
        return False
    windows = PureWindowsPath(value)
    posix = PurePosixPath(value)
    return (posix.is_absolute() and len(posix.parts) > 2) or (bool(windows.drive) and bool(windows.root))
