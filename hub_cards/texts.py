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
    r"(?<![\w/.])/(?:home|Users|root|tmp|mnt|media|scratch|workspace)/[\w.-]|file:///|[A-Za-z]:\\(?:Users|home)\\"
)
"""Beginnings of paths on somebody's machine, within a text."""


def load_json(data: bytes) -> Any:
    """What a JSON file says. Raises `ValueError` if it is none; NaN and infinity are none."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number in JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises `ValueError` with the file's name if it is none."""
    try:
        content = load_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(content).__name__}.")
    return content


def as_json(content: Any) -> str:
    """The text of a JSON file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file."""
    path.write_text(as_json(content), encoding="utf-8", newline="\n")


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


def forget_places(content: Any) -> Any:
    """A JSON value without the fields that hold nothing but a path of a machine."""
    if isinstance(content, dict):
        return {name: forget_places(value) for name, value in content.items() if not is_absolute_path(value)}
    return [forget_places(value) for value in content] if isinstance(content, list) else content


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


def has_place(value: Any) -> bool:
    """Whether a value is a text with a path of a machine in it."""
    return isinstance(value, str) and (is_absolute_path(value) or PLACES.search(value) is not None)
