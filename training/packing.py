# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Text as sequences of tokens of one length: packed once and kept on disk, or packed while it is streamed."""

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator
from glob import escape, glob
from itertools import chain, islice
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import REGEX_COMMIT_HASH
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase


FORMATS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file, apart from a compression's -> the loader of `datasets` that reads it."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

BATCH = 1_000_000
"""About so many characters are tokenised together."""

PACKING = 1
"""Raised when `pack` makes other sequences of the same text: runs that began with another number cannot go on."""


def find_files(files: str | list[str]) -> list[Path]:
    """The files that paths, folders and patterns name, in order; in the latter two, files of a known suffix.

    Hidden ones are left out. Raises `ValueError` for a name without files, and for a file of no known suffix.
    """
    names = [files] if isinstance(files, str) else files
    if not names or "" in names:
        raise ValueError(f"`data.files` must be a path, folder or pattern, or a list of them, got {files!r}.")
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_file() and not file_format(path):
            raise ValueError(f"`data.files`: {name} must end in one of {', '.join(FORMATS)}, compressed or not.")
        pattern = f"{escape(str(path))}{'/**' if path.is_dir() else ''}" if path.exists() else str(path)
        matches = map(Path, sorted(glob(pattern, recursive=True)))
        paths = [match for match in matches if match.is_file() and file_format(match)]
        if not paths:
            raise ValueError(f"`data.files`: {name} names no file with text ({', '.join(FORMATS)}).")
        found += paths
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
    """Documents, streamed: one after the other from disk or the Hub.

    A text file is one document and is tokenised whole, which takes about 150 times its size in memory: huge ones should
    be rows of a `.jsonl`.

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
        yield from iter_column(load_dataset(dataset, name, split=split, revision=revision, streaming=True), column)
        return
    assert files is not None
    for path in find_files(files):
        loader = file_format(path)
        try:
            if loader == "text":
                with LocalFileSystem().open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
                    yield file.read()
            else:
                options = {"keep_default_na": False} if loader == "csv" else {}  # "NA" is a text
                rows = load_dataset(loader, data_files=escape(str(path)), split="train", streaming=True, **options)
                yield from iter_column(rows, column)
        except Exception as error:  # whatever a decompressor or parser raises
            raise ValueError(f"`data.files`: cannot read {path}: {error}") from error


DEFAULTS = {name: field.default for name, field in inspect.signature(read_documents).parameters.items()}


def iter_column(rows: Iterable[dict[str, Any]], column: str) -> Iterator[str]:
    """The texts in one column, without those that are missing."""
    for row in rows:
        if column not in row:
            columns = ", ".join(f"`{name}`" for name in row)
            raise ValueError(f"`data.column` must name a column with text, got {column!r}; the columns are {columns}.")
        if not isinstance(row[column], str | None):
            raise ValueError(f"`data.column`: {column!r} must be a column with text, it has {row[column]!r}.")
        if row[column]:
            yield row[column]


def pack(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, max_tokens: int | None = None
) -> Iterator[dict[str, list[int]]]:
    """Cuts the stream of all documents into sequences of `length` tokens.

    Each document is encoded as the tokenizer does it and ended by its end-of-text token; nothing is lost but what
    does not fill the last sequence, or comes after `max_tokens`. Documents without text are left out.

    Raises:
        ValueError: all texts together do not fill a sequence.
    """
    stream = islice(chain.from_iterable(tokenised(documents, tokenizer)), max_tokens)
    empty = True
    while len(ids := list(islice(stream, length))) == length:
        yield {"input_ids": ids}
        empty = False
    if empty:
        raise too_short(length, len(ids))


def tokenised(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The tokens of documents of about `BATCH` characters together, each ended by the end-of-text token."""
    end = tokenizer.eos_token_id

    def encode(batch: list[str]) -> list[int]:
        encoded = tokenizer(batch, verbose=False)["input_ids"]
        return [token for ids in encoded for token in (ids if ids[-1:] == [end] else [*ids, end])]

    batch: list[str] = []
    characters = 0
    for text in filter(None, documents):
        batch.append(text)
        characters += len(text)
        if characters >= BATCH:
            yield encode(batch)
            batch, characters = [], 0
    if batch:
        yield encode(batch)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` if the tokenizer cannot end documents."""
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer {tokenizer.name_or_path} needs an `eos_token`, which ends documents.")


def too_short(length: int, tokens: int) -> ValueError:
    """The error for a text without a whole sequence."""
    return ValueError(f"`data`: the text must fill at least one sequence of {length} tokens, it has {tokens}.")


def resolve_revision(source: dict[str, Any]) -> dict[str, Any]:
    """What to read, with the commit of a repository of the Hub, as far as it can be asked. A commit stays as it is."""
    dataset, revision = source.get("dataset"), source.get("revision")
    if not dataset or Path(dataset).exists() or REGEX_COMMIT_HASH.fullmatch(revision or ""):
        return source
    try:
        return source | {"revision": HfApi().dataset_info(dataset, revision=revision).sha}
    except (OSError, HfHubHTTPError):  # offline: what `datasets` has of it
        return source


def fingerprint(tokenizer: PreTrainedTokenizerBase, length: int, max_tokens: int | None = None, **source: Any) -> str:
    """32 hexadecimal digits that differ where `load_packed_dataset` gives other sequences.

    The arguments are those of `load_packed_dataset`, or `streaming=True` for a `PackedStream`. Branches and tags are
    not resolved here.
    """
    files: list[Path] = find_files(source["files"]) if source.get("files") is not None else []
    if source.get("dataset") and Path(source["dataset"]).exists():
        files = [path for path in sorted(Path(source["dataset"]).rglob("*")) if path.is_file()]
    fields = DEFAULTS | source
    del fields["files"]  # which they are is told by their paths
    known = {
        "packing": PACKING,
        "source": fields,
        "files": [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "tokenizer": [tokenizer.backend_tokenizer.to_str()]
        if tokenizer.is_fast
        else [repr(tokenizer), tokenizer.get_vocab()],
        "special": [tokenizer.eos_token_id, getattr(tokenizer, "split_special_tokens", None)],
        "length": length,
        "max_tokens": max_tokens,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def load_packed_dataset(
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
    check_tokenizer(tokenizer)
    if max_tokens is not None and max_tokens < length:
        raise ValueError(f"`data.max_tokens` must be a sequence of {length} at least, got {max_tokens}.")
    source = resolve_revision(source)  # the commit that is read is the one that is known by its fingerprint
    try:
        return Dataset.from_generator(
            lambda: pack(read_documents(**source), tokenizer, length, max_tokens),
            features=Features({"input_ids": List(Value("int32"), length)}),
            cache_dir=cache_dir,
            fingerprint=fingerprint(tokenizer, length, max_tokens, **source),
        )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None


class PackedStream(IterableDataset):
    """Sequences for a causal language model, packed while a dataset is streamed, so that training starts at once.

    They are those of `load_packed_dataset`, in the order of the dataset, without shuffling; after the last one the
    dataset is read again from its beginning. Nothing is kept on disk. With several processes the Trainer has the main
    one read and deals its sequences out, so what is learned does not depend on their number.

    Args:
        tokenizer: with an `eos_token`, to end documents.
        length: tokens of a sequence.
        sequences: how many there are, in all epochs.
        held_out: so many sequences at the beginning of the dataset are left out.
        state: what `state` gave, to go on from there.
        source: what to read, see `read_documents`: `dataset`, and what belongs to it.

    Raises:
        ValueError: the tokenizer has no `eos_token`; and, when it is read, the text is shorter than the sequences left
            out and one, or see `read_documents`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        sequences: int,
        held_out: int = 0,
        state: dict[str, Any] | None = None,
        *,
        dataset: str,
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        column: str = "text",
    ) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer, self.length, self.sequences, self.held_out = tokenizer, length, sequences, held_out
        self.source = {"path": dataset, "name": name, "split": split, "revision": revision}
        self.column = column
        self.states = [state or {"sequences": 0, "rows": None, "rest": [], "skip": held_out * length}]

    def __len__(self) -> int:
        """How many sequences there are, with those before `state`."""
        return self.sequences

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        del self.states[1:]
        state = self.states[0]
        done, rest, skip, row_state = state["sequences"], list(state["rest"]), state["skip"], state["rows"]
        while done < self.sequences:
            rows = load_dataset(**self.source, streaming=True)
            if row_state is not None:
                rows.load_state_dict(row_state)
            empty = row_state is None
            for tokens in tokenised(iter_column(rows, self.column), self.tokenizer):
                rest += tokens
                start = min(skip, len(rest))
                skip -= start
                while start + self.length <= len(rest) and done < self.sequences:
                    yield {"input_ids": rest[start : start + self.length]}
                    start, done, empty = start + self.length, done + 1, False
                del rest[:start]
                self.states.append({"sequences": done, "rows": rows.state_dict(), "rest": rest.copy(), "skip": skip})
                if done == self.sequences:
                    return
            if empty:
                raise too_short(self.length, len(rest))
            rest, skip, row_state = [], self.held_out * self.length, None
            self.states.append({"sequences": done, "rows": None, "rest": [], "skip": skip})

    def state(self, sequences: int) -> dict[str, Any]:
        """From where another stream goes on after so many sequences, as JSON keeps it. Forgets what was before."""
        while len(self.states) > 1 and self.states[1]["sequences"] <= sequences:
            del self.states[0]
        state = self.states[0]
        left_out = (sequences - state["sequences"]) * self.length  # of the documents that are tokenised next
        return state | {"sequences": sequences, "skip": state["skip"] + left_out}
