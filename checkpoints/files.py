# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of a model's files; finding, replacing and locking files and folders."""

import glob
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import huggingface_hub  # imports its modules on first use, which takes a second
import psutil
from filelock import FileLock, Timeout


NAMES = ("model.safetensors", "pytorch_model.bin")
"""transformers' names of a folder's weights. With `.index.json` appended, the name of the index of shards."""

AUXILIARY_FILES = (
    "tokenizer*.json",
    "tokenizer.model*",
    "*.tiktoken",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
)
"""Files of the tokenizer, chat template, generation settings and the model's licence, which are copied unchanged."""

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")


def locate(src: str | os.PathLike[str], revision: str | None, patterns: Iterable[str]) -> Path:
    """Return the absolute path of a path or of a repository of the Hub, which is downloaded unless it is cached.

    Args:
        src: path, or repository `owner/name` of the Hub. A path that exists takes precedence.
        revision: branch, tag or commit of the repository.
        patterns: names of the files to download.

    Raises:
        FileNotFoundError: the repository cannot be downloaded, or the path is a broken link.
        ValueError: a revision is given for something that is not a repository.
    """
    name, path = os.fspath(src), Path(os.path.abspath(src))
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path} is a link to {os.readlink(path)}, which does not exist or leads back to it.")
    if path.exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        if revision is not None:
            raise ValueError(f"`revision` is only for a repository of the Hub, and {name} is a path, got {revision!r}.")
        return path
    offline = huggingface_hub.is_offline_mode()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), local_files_only=offline
            )
        )
    except Exception as error:  # of the network, the cache or the name: one message for all
        raise FileNotFoundError(
            f"{path} does not exist, and the repository {name} cannot be downloaded from the Hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def leads_out(file: Path, folder: Path) -> bool:
    """Whether a file is a link that leads out of its folder. In the Hub's cache, files are links to its blobs."""
    folder, target = (Path(os.path.realpath(path)) for path in (folder, file))  # `resolve` fails at a loop of links
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    return not (target.is_relative_to(folder) or target.is_relative_to(blobs))


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically, and create missing folders. An existing file keeps its mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # of processes that were killed
        pid = re.fullmatch(r"\d{1,9}", left.name.split(".")[-2])
        if pid and not psutil.pid_exists(int(pid[0])):
            left.unlink(missing_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        if path.exists():
            new.chmod(path.stat().st_mode)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def locked(folder: Path, instead: str) -> Iterator[None]:
    """Lock a folder for this run. Creates it with its parents, and removes those folders that are empty at the end.

    The operating system releases the lock when its process ends, also when it is killed. Raises `ValueError` with the
    advice `instead` if another living process has locked it.
    """
    created = [path for path in folder.parents if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"Another run is writing into {folder}: wait until it ends, or {instead}.") from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove an open file
            (folder / ".lock").unlink()
        lock.release()
        with suppress(OSError):  # not empty
            for path in (folder, *created):
                path.rmdir()


def check_space(nbytes: int, dest: Path) -> None:
    """Raise `OSError` if the disk of `dest` has less free space than `nbytes` and 1 MiB."""
    place = next(parent for parent in Path(os.path.realpath(dest)).parents if parent.exists())
    needed, free = nbytes + (1 << 20), shutil.disk_usage(place).free
    if needed > free:
        raise OSError(f"{place} has {free / 1e9:.3g} GB left and the result needs {needed / 1e9:.3g} GB. Make room.")
