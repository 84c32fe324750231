# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Find and read the probes' data: the published files, or a small built-in sample of each."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import fsspec

from diffllama.evaluation.models import digest


SAMPLES = Path(__file__).parent / "samples"
"""Made-up samples: enough to try a probe, too little to evaluate a model."""


@dataclass(frozen=True)
class Source:
    """The file or folder with a probe's data, and whether it is the built-in sample."""

    path: Path
    built_in: bool

    def facts(self) -> dict[str, Any]:
        """Return what identifies the data in a report."""
        return {"path": f"built-in {self.path.name}" if self.built_in else str(self.path), "sha256": digest(self.path)}

    def file(self, *names: str) -> Path:
        """Return the data's file or, in a folder, the first of `names` that exists.

        Raises:
            FileNotFoundError: the folder has none of them.
        """
        if self.path.is_file():
            return self.path
        for name in names:
            if (self.path / name).is_file():
                return self.path / name
        raise FileNotFoundError(f"{self.path} has no {' or '.join(names)}. Name the file or its folder with --data.")


def find(name: str, data: Path | None) -> Source:
    """Find the data called `name`: `data/name` if that is a folder, else `data`; the built-in sample without `data`.

    Raises:
        FileNotFoundError: `data` does not exist.
    """
    if data is None:
        return Source(SAMPLES / name, built_in=True)
    data = data.expanduser()
    if not data.exists():
        raise FileNotFoundError(f"{data} does not exist. Name a file or folder with {name} with --data.")
    return Source(data / name if (data / name).is_dir() else data, built_in=False)


def read_text(file: Path, encoding: str = "utf-8-sig") -> str:
    """Read a text file, decompressed according to its suffix.

    Raises:
        ValueError: the file is not text, or it is truncated.
    """
    try:
        with fsspec.open(str(file), "rt", encoding=encoding, compression="infer") as stream:
            return stream.read()
    except (EOFError, UnicodeDecodeError, OSError, BadZipFile) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise ValueError(f"{file} cannot be read as text: {error}") from error


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON file (a list, or one per line) or the rows of a .csv file with a header.

    Raises:
        ValueError: the file has another format.
    """
    text = read_text(file).strip()
    if ".csv" in file.suffixes:
        try:
            rows = list(csv.DictReader(io.StringIO(text)))
        except csv.Error as error:
            raise ValueError(f"{file} is not CSV: {error}") from error
        if not rows or any(None in row or None in row.values() for row in rows):
            raise ValueError(f"{file} must have a header line, and rows with a field for each of its columns.")
        return rows
    try:
        if text.startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON or JSON lines: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file} must have JSON objects, in a list or one per line.")
    return rows


def field(row: dict[str, Any], name: str | Sequence[str], file: Path) -> Any:
    """Return the value of the first field of `name` that the row has.

    Raises:
        ValueError: the row has none of them. The message names the file.
    """
    names = [name] if isinstance(name, str) else name
    for key in names:
        if key in row:
            return row[key]
    expected = " or ".join(f"`{key}`" for key in names)
    raise ValueError(f"{file} has a row without {expected}; its fields are {', '.join(row)}.")


def text_field(row: dict[str, Any], name: str | Sequence[str], file: Path) -> str:
    """Return the same as `field`, which must be a non-empty text; otherwise raise `ValueError`."""
    value = field(row, name, file)
    if not isinstance(value, str) or not value.strip() or re.search("[\ud800-\udfff]", value):  # half a character
        names = name if isinstance(name, str) else " or ".join(name)
        raise ValueError(f"{file} has a row in which {names} must be non-empty text, got {value!r:.60}.")
    return value


def texts(source: Source) -> dict[str, str]:
    """Read long texts by name: a folder's .txt files, compressed or not, or field `text` of a .jsonl file's rows.

    Raises:
        ValueError: there is no text.
    """
    path = source.path
    files = [path] if path.is_file() else sorted(path.glob("[!.]*"))  # the data's hash leaves out hidden files, too
    by_name: dict[str, str] = {}
    for file in files:
        if ".jsonl" in file.suffixes:
            rows = enumerate(read_rows(file))
            by_name |= {f"{file.name}:{number}": text_field(row, "text", file) for number, row in rows}
        elif ".txt" in file.suffixes:
            by_name[file.name] = read_text(file)
    if not by_name:
        raise ValueError(f"{path} has no text. It needs .txt files, compressed or not, or .jsonl files with `text`.")
    return by_name
