# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any


def load_json(data: bytes, unique: bool = False) -> Any:
    """Read any value from a JSON file. Raises `ValueError` if it is not valid JSON, also for NaN and infinity.

    With `unique`, it also refuses an object with a repeated key, of which programs read different values.
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
    """Read an object from a JSON file. Raises `ValueError` with the file's name if it has anything else."""
    try:
        content = load_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(content).__name__}.")
    return content


def as_json(content: Any) -> str:
    """Format a value as the text of a JSON file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file."""
    path.write_text(as_json(content), encoding="utf-8", newline="\n")
