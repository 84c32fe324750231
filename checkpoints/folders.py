# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces output folders atomically."""

import glob
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from diffllama.checkpoints.files import AUXILIARY_FILES


LOCK = "diffllama.lock"
REPOSITORIES = (".git", ".hg", ".svn", ".jj", ".bzr")
MODEL_FILES = (
    *("config.json", "conversion.json", "training.json", "evaluation.json", "README.md", "*.py", ".gitattributes"),
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json"),
    *AUXILIARY_FILES,
)
"""The files of a model folder."""
logger = logging.getLogger(__name__)


@contextmanager
def new_folder(dest: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `dest`, which is renamed to `dest` when the block ends without an exception.

    If the block fails, is interrupted, or `dest` cannot be replaced, the temporary folder is removed and `dest` is
    unchanged. If `dest` is a link to a folder, that folder is replaced. First, folders that killed processes left are
    removed, and a `dest` that one of them had moved away is restored.

    Args:
        dest: the folder to create, with its parents.
        overwrite: whether to replace an existing folder that is not empty; it must have a config.json.

    Raises:
        FileExistsError: `dest` is not a folder, or is not empty and may not be replaced.
    """
    check_free(dest, overwrite)
    dest = Path(os.path.realpath(dest))
    dest.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(dest)
    check_free(dest, overwrite)
    if others := other_files(dest):
        logger.warning("Replacing %s. These files do not belong to a model and will be lost: %s", dest, listed(others))
    with work_folder(dest) as work:
        new, old = work / "new", work / "old"
        new.mkdir()  # with the usual permissions; other users may not read mkdtemp's folder
        try:
            yield new
            check_free(dest, overwrite)
            if dest.exists():
                dest.rename(old)
            new.rename(dest)
        except BaseException:
            if old.exists() and not dest.exists():
                old.rename(dest)
            raise


@contextmanager
def work_folder(dest: Path) -> Iterator[Path]:
    """Create a hidden folder beside `dest`, with a lock while this process lives, and remove it at the end."""
    work = Path(tempfile.mkdtemp(prefix=work_prefix(dest), dir=dest.parent))
    lock = FileLock(work / LOCK)
    with suppress(OSError, NotImplementedError):  # without locks in the file system, leftovers are not removed
        lock.acquire()
    try:
        yield work
    finally:
        if dest.exists() or not (work / "old").exists():  # the old `dest` is kept unless something replaced it
            remove(work)
        lock.release()


def work_prefix(dest: Path) -> str:
    """Return the prefix of hidden folders for `dest`; `tempfile` appends 8 characters."""
    return f".{dest.name[:40]}.{zlib.crc32(os.fsencode(dest.name)):08x}."  # long names may begin alike


def remove(work: Path) -> None:
    """Remove a hidden folder, its lock last, so that `remove_leftovers` finds it if the process is killed meanwhile."""
    for path in work.glob("*"):
        if path.name != LOCK:
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)


def remove_leftovers(dest: Path) -> None:
    """Remove hidden folders of killed processes, see `new_folder`.

    If a process was killed between the two renames, `old` has the former `dest` and `new` the result.
    """
    for work in dest.parent.glob(f"{glob.escape(work_prefix(dest))}{'[a-z0-9_]' * 8}"):
        old, new = work / "old", work / "new"
        if not (work / LOCK).is_file() or not (old.exists() or new.exists()):
            continue  # not ours, or not locked yet
        with suppress(Timeout, OSError, NotImplementedError), FileLock(work / LOCK, blocking=False):
            if old.exists() and new.exists() and not dest.exists():
                old.rename(dest)
                logger.warning("%s is restored: a process was killed while it replaced the folder.", dest)
            remove(work)


def other_files(folder: Path) -> list[str]:
    """Return the files of a folder that do not belong to a model."""
    known = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in files if path not in known)


def listed(names: Sequence[str], most: int = 20) -> str:
    """Join at most `most` names, and count the others."""
    return ", ".join(names[:most]) + f" and {len(names) - most:,} more" * (len(names) > most)


def check_apart(src: Path, dest: Path) -> None:
    """Raise `FileExistsError` if two paths are equal or one contains the other."""
    real_src, real_dest = (Path(os.path.realpath(path)) for path in (src, dest))  # paths may differ by links
    if real_dest == real_src or real_dest in real_src.parents or real_src in real_dest.parents:
        raise FileExistsError(f"{dest} and {src} overlap. Name a folder outside of the source.")


def check_free(dest: Path, overwrite: bool) -> None:
    """Raise `FileExistsError` unless `dest` can be created, or is a model folder that may be replaced."""
    existing = next(path for path in (dest, *dest.parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        raise FileExistsError(f"{existing} is not a folder. Name another place for {dest.name}.")
    if existing != dest:
        return
    dest = Path(os.path.realpath(dest))
    if dest == Path.cwd() or dest.is_mount():
        what = "the current folder" if dest == Path.cwd() else "a mount point"
        raise FileExistsError(f"{dest} is {what}, which cannot be replaced. Name a folder inside it.")
    if not any(dest.iterdir()):
        return
    if repository := next((path for path in sorted(dest.rglob(".*")) if path.name in REPOSITORIES), None):
        raise FileExistsError(
            f"{dest} contains a repository ({repository}). Name another folder, or move the repository."
        )
    if not (dest / "config.json").is_file():
        raise FileExistsError(f"{dest} is not empty and no model folder: it has no config.json. Name another folder.")
    if not overwrite:
        others = other_files(dest)
        more = f" These files do not belong to a model and would be lost: {listed(others)}." * bool(others)
        raise FileExistsError(
            f"{dest} exists and is not empty. Name another folder or overwrite it with --overwrite.{more}"
        )
