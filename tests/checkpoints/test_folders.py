import errno
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffllama.checkpoints.folders import LOCK, check_free, new_folder, remove_leftovers, work_prefix
from support.llama_checkpoints import snapshot


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    """A folder that looks like a model folder."""
    folder = tmp_path / "dest"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    return folder


def test_folders_appear_where_the_blocks_began_when_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dest = tmp_path / "a" / "b" / "dest"
    with new_folder(Path("a/b/dest"), overwrite=True) as folder, new_folder(dest) as second:
        os.chdir("/")
        assert folder != second
        assert dest.parent in folder.parents  # on the same file system
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("new")
        (second / "config.json").touch()
        assert not dest.exists()
    assert snapshot(tmp_path) == {
        "a": None,
        "a/b": None,
        "a/b/dest": None,
        "a/b/dest/sub": None,
        "a/b/dest/sub/file": b"new",
    }


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077], ids=oct)
def test_folder_has_the_usual_permissions(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        (tmp_path / "usual").mkdir()
        with new_folder(tmp_path / "dest"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "dest").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_block_that_fails_changes_nothing(overwrite: bool, error: type[BaseException], dest: Path) -> None:
    def fail() -> None:
        with new_folder(dest if overwrite else dest.with_name("other"), overwrite) as folder:
            (folder / "new").write_text("new")
            raise error

    before = snapshot(dest.parent)
    with pytest.raises(error):
        fail()
    assert snapshot(dest.parent) == before


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("moved", ["old", "new"])
def test_exception_while_the_folder_is_replaced_changes_nothing(
    moved: str, error: type[BaseException], dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == moved == "new":
            raise error("no such luck")
        renamed = rename(path, target)
        if target.name == moved == "old":
            raise error("no such luck")
        return renamed

    before = snapshot(dest.parent)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(error, match="no such luck"), new_folder(dest, overwrite=True):
        assert snapshot(dest) == {"config.json": b"old"}
    assert snapshot(dest.parent) == before


def test_folder_that_was_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def be_slow() -> None:
        with new_folder(tmp_path / "dest"):
            (tmp_path / "dest").mkdir()
            (tmp_path / "dest" / "other").write_text("another process was faster")

    with pytest.raises(FileExistsError, match="not empty"):
        be_slow()
    assert snapshot(tmp_path) == {"dest": None, "dest/other": b"another process was faster"}


def test_link_to_a_folder_stays_and_the_folder_is_replaced(dest: Path) -> None:
    (dest.parent / "disk").mkdir()
    moved = dest.rename(dest.parent / "disk" / "model")
    dest.symlink_to(moved)
    with new_folder(dest, overwrite=True) as folder:
        assert moved.parent in folder.parents
        (folder / "new").write_text("new")
    assert snapshot(dest.parent) == {"disk": None, "disk/model": None, "disk/model/new": b"new", "dest": str(moved)}


def hide_config(root: Path) -> None:
    (root / "dest" / "config.json").rename(root / "dest" / ".hidden")


def links(root: Path) -> None:
    (root / "link").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")


def repository(name: str, as_file: bool = False) -> Callable[[Path], None]:
    def prepare(root: Path) -> None:
        path = root / "dest" / name
        path.parent.mkdir(exist_ok=True)
        path.touch() if as_file else path.mkdir()

    return prepare


def nothing(root: Path) -> None: ...


REFUSED = {
    "a file": (nothing, "dest/config.json", r"config\.json is not a folder"),
    "below a file": (nothing, "dest/config.json/a/dest", r"config\.json is not a folder"),
    "a dangling link": (links, "link", "link is not a folder"),
    "below a dangling link": (links, "link/dest", "link is not a folder"),
    "a loop of links": (links, "loop", "loop is not a folder"),
    "no model": (hide_config, "dest", r"dest is not empty and no model folder: it has no config\.json\. Name another"),
    "the current folder": (lambda root: os.chdir(root / "dest"), "dest", "is the current folder.* folder inside it"),
    "a mount point": (nothing, "/", "is a mount point"),
    **{
        name: (repository(name), "dest", rf"dest contains a repository \(.*{name}\)")
        for name in (".git", ".hg", ".svn", "sub/.git")
    },
    ".git as a file": (repository(".git", as_file=True), "dest", r"dest contains a repository \(.*\.git\)"),
}
"""Name -> what is done to a folder with the model `dest`, where the result is to be, and what is said, always."""


@pytest.mark.parametrize("name", REFUSED)
def test_folder_that_is_no_model_is_never_replaced(name: str, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, place, message = REFUSED[name]
    monkeypatch.chdir(dest.parent)
    prepare(dest.parent)
    before = snapshot(dest.parent)
    for check in (check_free, lambda *given: new_folder(*given).__enter__()):
        for overwrite in (False, True):  # so that no message advises to overwrite
            with pytest.raises(FileExistsError, match=message):
                check(dest.parent / place, overwrite)
    assert snapshot(dest.parent) == before


def test_model_folder_is_replaced_only_on_request_and_a_missing_one_is_free(dest: Path) -> None:
    for check in (check_free, lambda *given: new_folder(*given).__enter__()):
        with pytest.raises(FileExistsError, match=r"not empty\..*--overwrite"):
            check(dest, False)
    check_free(dest, True)
    check_free(dest.parent / "a" / "b", False)
    assert snapshot(dest.parent) == {"dest": None, "dest/config.json": b"old"}


def test_files_beside_the_models_are_listed_before_and_when_they_are_lost(
    dest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("model.safetensors", "tokenizer.json", "modeling_diffllama.py", "optimizer.pt", "notes/thesis.tex"):
        (dest / name).parent.mkdir(exist_ok=True)
        (dest / name).touch()
    (dest / "loop").symlink_to("loop")
    lost = "loop, notes/thesis.tex, optimizer.pt"
    with pytest.raises(FileExistsError, match=rf"--overwrite\. These files do not belong to a model.* lost: {lost}\.$"):
        check_free(dest, False)
    assert caplog.text == ""
    with new_folder(dest, overwrite=True):
        pass
    assert f"dest. These files do not belong to a model and will be lost: {lost}" in caplog.text


# Killed processes

OLD, NEW = {"config.json": b"old"}, {"config.json": b"new"}


def replace_and_be_killed(dest: Path, moment: str) -> None:
    """Create the files of a process that is killed while it replaces a folder."""

    def kill(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def rename(path: Path, target: Path, rename: Any = Path.rename) -> None:
        moved = "old" if target.name == "old" else "new"
        if moment == f"before the {moved} one is moved":
            kill()
        rename(path, target)
        if moment == f"after the {moved} one is moved":
            kill()

    pid = os.fork()
    if pid == 0:
        try:
            Path.rename = rename  # type: ignore[assignment, method-assign]
            if moment == "while the old one is removed":
                shutil.rmtree = kill  # type: ignore[assignment]
            with new_folder(dest, overwrite=True) as folder:
                (folder / "config.json").write_text("new")
                if moment == "in the block":
                    kill()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize(
    ("moment", "stands"),
    [
        ("in the block", OLD),
        ("before the old one is moved", OLD),
        ("after the old one is moved", OLD),
        ("before the new one is moved", OLD),
        ("after the new one is moved", NEW),
        ("while the old one is removed", NEW),
    ],
)
def test_next_run_removes_what_a_killed_one_left_and_loses_nothing(
    moment: str, stands: dict[str, bytes], dest: Path
) -> None:
    replace_and_be_killed(dest, moment)
    (left,) = dest.parent.glob(".dest.*")
    assert left.is_dir()
    with pytest.raises(FileExistsError, match="not empty"), new_folder(dest):
        pass
    remove_leftovers(dest)
    assert snapshot(dest) == stands
    assert list(dest.parent.iterdir()) == [dest]


def test_replacement_by_a_killed_run_is_done_by_the_next_one(dest: Path) -> None:
    for _ in range(2):
        replace_and_be_killed(dest, "after the old one is moved")
    faster = dest.with_name("faster")  # an old folder is restored only if `dest` does not exist
    faster.mkdir()
    (faster / "config.json").write_text("old")
    replace_and_be_killed(faster, "after the old one is moved")
    faster.mkdir()
    (faster / "config.json").write_text("another process was faster")
    remove_leftovers(faster)
    assert snapshot(faster) == {"config.json": b"another process was faster"}
    shutil.rmtree(faster)
    with new_folder(dest, overwrite=True) as folder:
        assert snapshot(dest) == OLD
        (folder / "config.json").write_text("new")
    assert snapshot(dest) == NEW
    assert list(dest.parent.iterdir()) == [dest]


def test_folder_of_a_living_process_is_left_alone(dest: Path) -> None:
    with new_folder(dest, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
        remove_leftovers(dest)
        process = multiprocessing.get_context("fork").Process(target=remove_leftovers, args=(dest,))
        process.start()
        process.join()
        assert snapshot(folder) == NEW
    assert snapshot(dest) == NEW


def test_hidden_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    for number, name in enumerate(("new", LOCK)):  # without a lock, and locked but empty
        theirs = tmp_path / f"{work_prefix(tmp_path / 'dest')}0000000{number}" / name
        theirs.parent.mkdir()
        (theirs.touch if name == LOCK else theirs.mkdir)()
    for name in ("dest.more", "x" * 60, "x" * 61):
        replace_and_be_killed(tmp_path / name, "in the block")
    before = snapshot(tmp_path)
    for name in ("dest", "x" * 59, "x" * 62):
        remove_leftovers(tmp_path / name)
    assert snapshot(tmp_path) == before
    remove_leftovers(tmp_path / ("x" * 60))
    assert len(before) - len(snapshot(tmp_path)) == 4


def test_file_system_without_locks_is_written_to_and_never_tidied(dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_and_be_killed(dest, "in the block")
    before = snapshot(dest.parent)

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("diffllama.checkpoints.folders.FileLock.acquire", refuse)
    with new_folder(dest, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert snapshot(dest.parent) == before | {"dest/config.json": b"new"}
