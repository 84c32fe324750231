# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Text as sequences of tokens of one length, tokenised and packed once and kept on disk."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from glob import escape, glob
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from fsspec.implementations.local import LocalFileSystem
from transformers import PreTrainedTokenizerBase

from diffllama import __version__


FORMATS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file, apart from a compression's -> the loader of `datasets` that reads it."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

BATCH = 64  # documents that are tokenised together


def find_files(files: str | list[str]) -> list[Path]:
    """The files that paths, folders (with everything in them that has a known suffix) and patterns name, in order.

    Raises:
        ValueError: one of them names no file, or a file of no known suffix.
    """
    found: list[Path] = []
    for name in [files] if isinstance(files, str) else files:
        if Path(name).is_dir():
            paths = [path for path in sorted(Path(name).rglob("*")) if path.is_file() and file_format(path)]
        else:
            paths = [Path(name)] if Path(name).exists() else [Path(path) for path in sorted(glob(name, recursive=True))]
        if not paths:
            raise ValueError(f"`data.files`: {name} names no file with text ({', '.join(FORMATS)}).")
        found += paths
    unknown = [str(path) for path in found if not file_format(path)]
    if unknown:
        raise ValueError(f"`data.files`: {unknown[0]} must end in one of {', '.join(FORMATS)}, compressed or not.")
    return found


def file_format(path: Path) -> str | None:
    """The loader of `datasets` for a file, or `None`."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    return FORMATS.get(suffixes[-1]) if suffixes else None


def read_documents(
    files: str | list[str] | None = None,
    dataset: str | None = None,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    column: str = "text",
) -> Iterator[str]:
    """Documents, streamed: one after the other from disk or the Hub, never all in memory.

    Args:
        files: paths, folders or patterns, of text (`.txt`, `.md`: a file is a document), JSON lines, Parquet or CSV
            (a row is one), compressed or not. Or
        dataset: a repository of the Hub, with its configuration's `name`, `split` and `revision`.
        column: where the text stands in a row.

    Raises:
        ValueError: files are missing or of an unknown kind, or a row has no such column, or no text there.
    """
    if (files is None) == (dataset is None):
        raise ValueError("`data` needs exactly one of `files` and `dataset`.")
    if dataset is not None:
        yield from column_of(load_dataset(dataset, name, split=split, revision=revision, streaming=True), column)
        return
    for path in find_files(files or []):
        loader = file_format(path)
        try:
            if loader == "text":
                with LocalFileSystem().open(path, "rt", encoding="utf-8", compression="infer") as file:
                    yield file.read()
            else:
                rows = load_dataset(loader, data_files=escape(str(path)), split="train", streaming=True)
                yield from column_of(rows, column)
        except Exception as error:  # whatever a decompressor or parser raises
            raise ValueError(f"`data.files`: cannot read {path}: {error}") from error


def column_of(rows: Iterable[dict[str, Any]], column: str) -> Iterator[str]:
    """The texts in one column, without those that are missing."""
    for row in rows:
        text = row.get(column)
        if isinstance(text, str):
            yield text
        elif text is not None or column not in row:
            known = ", ".join(f"`{name}`" for name in row)
            raise ValueError(f"`data.column` must name a column with text, got {column!r}; the columns are {known}.")


def pack(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, max_tokens: int | None = None
) -> Iterator[dict[str, list[int]]]:
    """Cuts the stream of all documents into sequences of `length` tokens.

    Each document is encoded as the tokenizer does it and ended by its end-of-text token; nothing is lost but what
    does not fill the last sequence. Documents without text are left out.

    Args:
        documents: texts.
        tokenizer: with an `eos_token`.
        length: tokens of a sequence.
        max_tokens: where to stop.

    Raises:
        ValueError: all texts together do not fill a sequence.
    """
    end = tokenizer.eos_token_id
    rest: list[int] = []
    written = 0
    texts = (text for text in documents if text)
    while batch := list(islice(texts, BATCH)):
        for ids in tokenizer(batch, verbose=False)["input_ids"]:
            rest += ids if ids[-1:] == [end] else [*ids, end]
            whole = len(rest) // length * length
            for start in range(0, whole, length):
                if max_tokens is not None and written + length > max_tokens:
                    return
                yield {"input_ids": rest[start : start + length]}
                written += length
            del rest[:whole]
    if not written:
        raise ValueError(f"`data`: the text must fill at least one sequence of {length} tokens, it has {len(rest)}.")


def packed(
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    max_tokens: int | None = None,
    cache_dir: str | None = None,
    **source: Any,
) -> Dataset:
    """Sequences for a causal language model, from text, as a dataset that is memory-mapped.

    Text is tokenised and packed at the first call, with progress. A later call with the same text, tokenizer and
    length finds the result in the cache of `datasets`.

    Args:
        tokenizer: with an `eos_token`, to end documents.
        length: tokens of a sequence.
        max_tokens: at most so many in all.
        cache_dir: another place than that of `datasets`.
        source: what to read, see `read_documents`.

    Returns:
        Rows with `input_ids`, `length` int32 each.

    Raises:
        ValueError: the tokenizer has no `eos_token`, the text is shorter than a sequence, or see `read_documents`.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer {tokenizer.name_or_path} needs an `eos_token`, which ends documents.")
    if max_tokens is not None and max_tokens < length:
        raise ValueError(f"`data.max_tokens` must be a sequence of {length} at least, got {max_tokens}.")
    files = [str(path.absolute()) for path in find_files(source["files"])] if source.get("files") else []
    known: Any = {
        "by": __version__,
        "source": source,
        "files": [(path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for path in files],
        "tokenizer": tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer),
        "end": tokenizer.eos_token_id,
        "length": length,
        "max_tokens": max_tokens,
    }
    try:
        rows = Dataset.from_generator(
            lambda: pack(read_documents(**source), tokenizer, length, max_tokens),
            features=Features({"input_ids": List(Value("int32"), length)}),
            cache_dir=cache_dir,
            fingerprint=hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32],
        )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    return rows
