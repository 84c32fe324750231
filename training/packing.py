# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Pack text into token sequences of equal length: once and stored on disk, or while it is streamed."""

import copy
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator
from glob import escape, glob
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value, load_dataset
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetGenerationError
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import REGEX_COMMIT_HASH
from huggingface_hub.utils.sha import sha_fileobj
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase


FORMATS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Suffix of a file, without that of its compression -> loader of `datasets`."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

BATCH = 1_000_000
"""Approximate number of characters that are tokenized together."""

TOKENS, LABELS = "input_ids", "labels"
"""Columns of rows that are tokenized already. Labels are optional."""

IGNORED = -100
"""The label of a token that does not count in the loss."""

PACKING = 1
"""Version of `pack`. Increase it when the same text gives other sequences: runs of earlier versions cannot resume."""


def find_files(files: str | list[str]) -> list[Path]:
    """Find the files of paths, folders and patterns, in order.

    Folders and patterns give visible files with a known suffix. Raises `ValueError` for a name without such files.
    """
    names = [files] if isinstance(files, str) else files
    if not names or "" in names:
        raise ValueError(f"`data.files` must be a path, folder or pattern, or a list of them, got {files!r}.")
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_file() and not file_format(path):
            raise ValueError(f"`data.files` must end in one of {', '.join(FORMATS)}, compressed or not, got {name}.")
        pattern = f"{escape(str(path))}{'/**' if path.is_dir() else ''}" if path.exists() else str(path)
        matches = map(Path, sorted(glob(pattern, recursive=True)))
        paths = [match for match in matches if match.is_file() and file_format(match)]
        if not paths:
            raise ValueError(f"`data.files` must name files with text ({', '.join(FORMATS)}), found none at {name}.")
        found += paths
    return found


def file_format(path: Path) -> str | None:
    """Return the loader of `datasets` for a file, or `None`."""
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
    """Stream documents from disk or the Hub.

    A text file is one document. It is tokenized as a whole, which takes about 150 times its size in memory, so large
    texts should be rows of a `.jsonl`.

    Args:
        files: paths, folders or patterns of text (`.txt`, `.md`: one document per file), JSON lines, Parquet or CSV
            (one document per row), compressed or not. Give exactly one of `files` and `dataset`.
        dataset: a repository of the Hub.
        name: of the repository's configuration.
        split: of the repository.
        revision: branch, tag or commit of the repository.
        column: the column with the text.

    Raises:
        ValueError: a file is missing or has an unknown format, or a row has no text in the column.
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
            raise ValueError(f"`data.files`: {path} cannot be read: {error}") from error


DEFAULTS = {name: field.default for name, field in inspect.signature(read_documents).parameters.items()}


def iter_column(rows: Iterable[dict[str, Any]], column: str) -> Iterator[str]:
    """Yield the texts in one column, without missing ones. Raises `ValueError` if it has something else."""
    for row in rows:
        if column not in row:
            columns = ", ".join(f"`{name}`" for name in row)
            raise ValueError(f"`data.column` must name a column with text, got {column!r}; the columns are {columns}.")
        if not isinstance(row[column], str | None):
            raise ValueError(f"`data.column` must name a column with text, got {column!r}, which has {row[column]!r}.")
        if row[column]:
            yield row[column]


def pack(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, max_tokens: int | None = None
) -> Iterator[dict[str, list[int]]]:
    """Pack documents into sequences of `length` tokens.

    Each document is tokenized and ends with the EOS token. Tokens that do not fill the last sequence, or come after
    `max_tokens`, are dropped. Documents without text are skipped.

    Raises:
        ValueError: all texts together are shorter than a sequence.
    """
    stream = islice(chain.from_iterable(tokenized(documents, tokenizer)), max_tokens)
    empty = True
    while len(ids := list(islice(stream, length))) == length:
        yield {"input_ids": ids}
        empty = False
    if empty:
        raise too_short(length, len(ids))


def tokenized(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the tokens of batches of about `BATCH` characters, with the EOS token after each document."""
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
    """Raise `ValueError` if the tokenizer has no EOS token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer {tokenizer.name_or_path} must have an `eos_token`, to end documents.")


def too_short(length: int, tokens: int) -> ValueError:
    """Return the error for a text that is shorter than a sequence."""
    return ValueError(f"`data` must have text for at least one sequence of {length} tokens, got {tokens} tokens.")


def resolve_revision(source: dict[str, Any]) -> dict[str, Any]:
    """Replace the branch or tag of a repository of the Hub by its commit, if the Hub can be reached."""
    dataset, revision = source.get("dataset"), source.get("revision")
    if not dataset or Path(dataset).exists() or REGEX_COMMIT_HASH.fullmatch(revision or ""):
        return source
    try:
        return source | {"revision": HfApi().dataset_info(dataset, revision=revision).sha}
    except (OSError, HfHubHTTPError):  # offline: `datasets` uses its cache
        return source


def content_sha256(path: Path) -> str:
    """Compute the hexadecimal SHA-256 of a file."""
    with path.open("rb") as stream:
        return sha_fileobj(stream).hex()


def fingerprint(tokenizer: PreTrainedTokenizerBase, length: int, max_tokens: int | None = None, **source: Any) -> str:
    """Compute a fingerprint, 32 hexadecimal digits, that differs if `load_packed_dataset` returns other sequences.

    The arguments are those of `load_packed_dataset`; add `streaming=True` for a `PackedStream`. Branches and tags are
    not resolved to commits. Files are identified by name and content, so a copy elsewhere has the same fingerprint.
    """
    identities: list[Any] = []
    if source.get("files") is not None:
        identities = [(path.name, content_sha256(path)) for path in find_files(source["files"])]
    elif source.get("dataset") and Path(source["dataset"]).exists():  # may be too large to read before it is streamed
        files = [path for path in sorted(Path(source["dataset"]).rglob("*")) if path.is_file()]
        identities = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    fields = DEFAULTS | source
    del fields["files"]  # their content is, wherever they are
    known = {
        "packing": PACKING,
        "source": fields,
        "files": identities,
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
    """Pack text into sequences for a causal language model, as a memory-mapped dataset.

    The first call tokenizes and packs the text, with a progress bar. Later calls with the same text, tokenizer and
    length load the result from the cache of `datasets`.

    With `column="input_ids"`, rows are tokenized already: they have `length` token ids each, and are neither joined nor
    cut. A second column, `labels`, may have the same ids or -100, for tokens that do not count in the loss.

    Args:
        tokenizer: must have an `eos_token`, to end documents.
        length: sequence length in tokens.
        max_tokens: maximum number of tokens in all.
        cache_dir: cache folder; by default that of `datasets`.
        source: arguments of `read_documents`.

    Returns:
        Rows with `input_ids` and, if there are such, `labels`: [length] in int32.

    Raises:
        ValueError: the tokenizer has no `eos_token`, the text is shorter than a sequence, `read_documents` fails, or
            tokenized rows have another length or other tokens.
    """
    check_tokenizer(tokenizer)
    if max_tokens is not None and max_tokens < length:
        raise ValueError(f"`data.max_tokens` must be at least {length}, the sequence length, got {max_tokens}.")
    source = resolve_revision(source)  # so that the fingerprint is that of the commit that is read
    if source.get("column") == TOKENS:
        rows = load_tokenized_rows(len(tokenizer), length, cache_dir, **source)
        return rows if max_tokens is None else rows.select(range(min(len(rows), max_tokens // length)))
    try:
        return Dataset.from_generator(
            lambda: pack(read_documents(**source), tokenizer, length, max_tokens),
            features=Features({"input_ids": List(Value("int32"), length)}),
            cache_dir=cache_dir,
            fingerprint=fingerprint(tokenizer, length, max_tokens, **source),
        )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None


def load_tokenized_rows(
    vocabulary: int,
    length: int,
    cache_dir: str | None,
    files: str | list[str] | None = None,
    dataset: str | None = None,
    column: str = TOKENS,
    name: str | None = None,
    **options: Any,
) -> Dataset:
    """Load rows that are tokenized already, see `load_packed_dataset`. Raises `ValueError` for any others."""
    if (files is None) == (dataset is None):
        raise ValueError("`data` needs exactly one of `files` and `dataset`.")
    try:
        if dataset is not None:
            rows = load_dataset(dataset, name, cache_dir=cache_dir, **{"split": "train"} | options)
        else:
            assert files is not None
            paths = find_files(files)
            loaders = {str(file_format(path)) for path in paths}
            if len(loaders) > 1:
                raise ValueError(f"tokenized rows must be in files of one format, got {', '.join(sorted(loaders))}")
            names = [escape(str(path)) for path in paths]
            rows = load_dataset(loaders.pop(), data_files=names, split="train", cache_dir=cache_dir)
        if column not in rows.column_names:
            raise ValueError(f"there is no column {column}, only {', '.join(rows.column_names)}")
        columns = [name for name in (TOKENS, LABELS) if name in rows.column_names]
        rows = rows.select_columns(columns)
        for batch in rows.iter(batch_size=1000):
            for name in columns:
                ids = np.array(batch[name])  # rows of different lengths raise `ValueError`
                if ids.ndim != 2 or ids.shape[1] != length or ids.dtype.kind != "i":
                    raise ValueError(f"{name} must have rows of {length} token ids, the sequence length")
                wrong = ids[(ids < 0) | (ids >= vocabulary)]
                wrong = wrong[wrong != IGNORED] if name == LABELS else wrong
                if len(wrong):
                    raise ValueError(f"{name} must have token ids below {vocabulary}, got {wrong[0]}")
        return rows.cast(Features({name: List(Value("int32"), length) for name in columns}))
    except (ValueError, OSError, DatasetGenerationError) as error:
        raise ValueError(f"`data`: {files or dataset} cannot be read as tokenized rows: {error}.") from error


class PackedStream(IterableDataset):
    """Sequences for a causal language model, packed while a dataset is streamed, so that training starts at once.

    Each process, and each worker process of its data loader, reads and packs its own share of the dataset's files, in
    their order. (If the number of files is not a multiple of `processes`, every process reads all files and keeps its
    share of the documents.) At its end, a share is read again from the beginning. Nothing is stored on disk.
    `torchdata.stateful_dataloader.StatefulDataLoader` saves and restores the place in it.

    Args:
        tokenizer: must have an `eos_token`, to end documents.
        length: sequence length in tokens.
        held_out: number of sequences to skip at the beginning of the first share.
        process: index of this process.
        processes: number of processes.
        workers: number of worker processes of each process's data loader.
        dataset: see `read_documents`, as for `name`, `split`, `revision` and `column`.

    Raises:
        ValueError: the tokenizer has no `eos_token`, or there are more workers than files for them. When it is read:
            the share has no sequence after those held out, or `read_documents` would fail.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        held_out: int = 0,
        process: int = 0,
        processes: int = 1,
        workers: int = 0,
        *,
        dataset: str,
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        column: str = "text",
    ) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer, self.length, self.column, self.workers = tokenizer, length, column, workers
        rows = load_dataset(dataset, name, split=split, revision=revision, streaming=True)
        self.rows = split_dataset_by_node(rows, process, processes)
        self.held_out = 0 if process else held_out * length
        self.place: dict[str, Any] | None = None
        if workers > self.rows.num_shards:
            raise ValueError(
                f"`training.dataloader_num_workers` must be at most {self.rows.num_shards}, the number of files that "
                f"each of {processes} processes reads, got {workers}."
            )

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        worker = get_worker_info()
        share = self.rows  # `datasets` gives a worker its share of it
        if worker is None and self.workers > 1:
            share = share.shard(self.workers, 0, contiguous=False)  # the first worker's
        beginning: dict[str, Any] = {"rows": None, "rest": [], "skip": 0 if worker and worker.id else self.held_out}
        place = beginning if self.place is None else self.place
        while True:
            rows = copy.deepcopy(share)  # a state that is loaded stays
            if place["rows"]:
                rows.load_state_dict(place["rows"])
            rest, skip, empty = list(place["rest"]), place["skip"], place is beginning
            for tokens in tokenized(iter_column(rows, self.column), self.tokenizer):
                rest += tokens
                start = min(skip, len(rest))
                skip -= start
                while start + self.length <= len(rest):
                    start, empty = start + self.length, False
                    self.place = place | {"skip": start}  # tokens of `rest` and of the documents after `rows`
                    yield {"input_ids": rest[start - self.length : start]}
                del rest[:start]
                place = {"rows": rows.state_dict(), "rest": rest.copy(), "skip": skip}
            if empty:
                raise too_short(self.length, len(rest))
            place = beginning

    def state_dict(self) -> dict[str, Any] | None:
        """Return the place after the last sequence, as JSON."""
        return self.place

    def load_state_dict(self, place: dict[str, Any] | None) -> None:
        """Go on at a place when the sequences are read next."""
        self.place = place
