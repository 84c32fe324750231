# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any


def load_json(data: bytes, unique: bool = False) -> Any:
    """What a JSON file says. Raises `ValueError` if it is none; NaN and infinity are none.

    With `unique`, an object with the same key twice is none either: programs differ in which value they take.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number in JSON")

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"`{repeated[0]}` occurs {counts[repeated[0]]} times")
        return dict(pairs)

    try:
        return json.loads(data, parse_constant=refuse, object_pairs_hook=unique_keys if unique else None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises `ValueError` with the file's name if it is none."""
    try:
        content = load_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(content).__name__}.")
    return content


def as_json(content: Any) -> str:
    """The text of a JSON file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file."""
    path.write_text(as_json(content), encoding="utf-8", newline="\n")
