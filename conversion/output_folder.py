# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Output folders that appear complete or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(dest: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `dest` that becomes `dest` when the block ends without an exception.

    If the block fails, is interrupted, or `dest` cannot be replaced, the temporary folder is removed and what stood at
    `dest` before stands there still.

    Args:
        dest: the folder to make; its parents are made too.
        overwrite: whether a `dest` that exists and is not empty is replaced; only a folder with a config.json is.

    Raises:
        FileExistsError: `dest` is no folder, or one that is not empty and may not be replaced.
    """
    dest = Path(os.path.abspath(dest))
    check_free(dest, overwrite)
    dest.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{dest.name[:40]}.", dir=dest.parent))
    try:
        new = work / "new"
        new.mkdir()  # mkdtemp's own folder is closed to others; this one has the usual permissions
        yield new
        check_free(dest, overwrite)
        if dest.exists():
            dest.rename(work / "old")
        new.rename(dest)
    except BaseException:
        if (work / "old").exists() and not dest.exists():
            (work / "old").rename(dest)
        raise
    finally:
        if dest.exists() or not (work / "old").exists():  # what stood at `dest` is never removed with nothing there
            shutil.rmtree(work, ignore_errors=True)


def check_apart(src: Path, dest: Path) -> None:
    """Raises `FileExistsError` if one of two places is the other or lies in it."""
    real_src, real_dest = src.resolve(), dest.resolve()  # links may hide that one is in the other
    if real_dest == real_src or real_dest in real_src.parents or real_src in real_dest.parents:
        raise FileExistsError(f"{dest} and {src} overlap. Name a folder outside of the source.")


def check_free(dest: Path, overwrite: bool) -> None:
    """Raises `FileExistsError` unless `dest` may be made, or is a model folder that may be replaced."""
    existing = next(path for path in (dest, *dest.parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        raise FileExistsError(f"{existing} is not a folder. Name another place for {dest.name}.")
    if existing != dest:
        return
    if dest == Path.cwd() or dest.is_mount():
        what = "the current folder" if dest == Path.cwd() else "a mount point"
        raise FileExistsError(f"{dest} is {what}, which cannot be replaced. Name a folder inside it.")
    if not any(dest.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{dest} exists and is not empty. Name another folder or overwrite it with --overwrite.")
    if not (dest / "config.json").is_file():
        raise FileExistsError(f"{dest} has no config.json, so it is no model folder and is not overwritten.")
