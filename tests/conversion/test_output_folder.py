import os
from pathlib import Path

import pytest
from llamas import snapshot

from diffllama.conversion.output_folder import check_free, new_folder


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    """A folder that looks like a model's."""
    folder = tmp_path / "dest"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    return folder


def test_the_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    dest = tmp_path / "a" / "b" / "dest"
    with new_folder(dest) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("new")
        assert not dest.exists()
    assert snapshot(dest) == {"sub": None, "sub/file": b"new"}
    assert list(dest.parent.iterdir()) == [dest]


def test_the_old_folder_stands_until_the_block_ends(dest: Path) -> None:
    with new_folder(dest, overwrite=True) as folder:
        (folder / "new").write_text("new")
        assert snapshot(dest) == {"config.json": b"old"}
    assert snapshot(dest) == {"new": b"new"}
    assert list(dest.parent.iterdir()) == [dest]


def test_the_new_folder_is_made_on_the_same_file_system(tmp_path: Path) -> None:
    with new_folder(tmp_path / "dest") as folder:
        assert tmp_path in folder.parents


def test_an_empty_folder_is_replaced_without_asking(tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    with new_folder(tmp_path / "dest") as folder:
        (folder / "new").write_text("new")
    assert snapshot(tmp_path) == {"dest": None, "dest/new": b"new"}


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077], ids=oct)
def test_the_folder_has_the_usual_permissions(mask: int, tmp_path: Path) -> None:
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
def test_a_block_that_fails_changes_nothing(overwrite: bool, error: type[BaseException], dest: Path) -> None:
    def fail() -> None:
        with new_folder(dest if overwrite else dest.with_name("other"), overwrite) as folder:
            (folder / "new").write_text("new")
            raise error

    before = snapshot(dest.parent)
    with pytest.raises(error):
        fail()
    assert snapshot(dest.parent) == before


def test_what_cannot_be_put_in_place_is_undone(dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fail_for_new(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("no such luck")
        return rename(path, target)

    before = snapshot(dest.parent)
    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(OSError, match="no such luck"), new_folder(dest, overwrite=True):
        pass
    assert snapshot(dest.parent) == before


def test_a_folder_that_was_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def be_slow() -> None:
        with new_folder(tmp_path / "dest"):
            (tmp_path / "dest").mkdir()
            (tmp_path / "dest" / "other").write_text("another process was faster")

    with pytest.raises(FileExistsError, match="not empty"):
        be_slow()
    assert snapshot(tmp_path) == {"dest": None, "dest/other": b"another process was faster"}


def test_two_folders_for_one_place_are_kept_apart(tmp_path: Path) -> None:
    with new_folder(tmp_path / "dest", overwrite=True) as first, new_folder(tmp_path / "dest") as second:
        assert first != second
        (first / "first").touch()
        (second / "config.json").touch()
    assert snapshot(tmp_path) == {"dest": None, "dest/first": b""}


def test_a_relative_name_means_a_folder_of_where_the_block_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with new_folder(Path("dest")):
        os.chdir("elsewhere")
    assert snapshot(tmp_path) == {"elsewhere": None, "dest": None}


def test_a_link_is_replaced_and_not_what_it_points_to(dest: Path) -> None:
    link = dest.with_name("link")
    link.symlink_to(dest)
    with new_folder(link, overwrite=True) as folder:
        (folder / "new").write_text("new")
    assert snapshot(dest.parent) == {"dest": None, "dest/config.json": b"old", "link": None, "link/new": b"new"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_never_replaced(overwrite: bool, dest: Path) -> None:
    for check in (check_free, lambda *given: new_folder(*given).__enter__()):
        with pytest.raises(FileExistsError, match=r"config\.json is not a folder"):
            check(dest / "config.json", overwrite)
    assert snapshot(dest.parent) == {"dest": None, "dest/config.json": b"old"}


def test_a_model_folder_is_replaced_only_on_request(dest: Path) -> None:
    for check in (check_free, lambda *given: new_folder(*given).__enter__()):
        with pytest.raises(FileExistsError, match=r"not empty\..*--overwrite"):
            check(dest, False)
    check_free(dest, True)
    assert snapshot(dest) == {"config.json": b"old"}


def test_a_folder_that_is_no_model_is_never_replaced(dest: Path) -> None:
    (dest / "config.json").rename(dest / ".hidden")
    for check in (check_free, lambda *given: new_folder(*given).__enter__()):
        with pytest.raises(FileExistsError, match=r"no config\.json.*not overwritten"):
            check(dest, True)
    assert snapshot(dest) == {".hidden": b"old"}


def test_a_place_under_a_file_or_behind_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for dest, culprit in ((tmp_path / "file" / "a" / "dest", "file"), (tmp_path / "link", "link")):
        with pytest.raises(FileExistsError, match=f"{culprit} is not a folder"):
            check_free(dest, True)


def test_a_missing_folder_is_free(tmp_path: Path) -> None:
    assert check_free(tmp_path / "a" / "b", False) is None
    assert list(tmp_path.iterdir()) == []


def test_a_signal_after_the_old_folder_was_moved_away_brings_it_back(
    dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if target.name == "old":
            raise KeyboardInterrupt
        return renamed

    before = snapshot(dest.parent)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(dest, overwrite=True):
        pass
    assert snapshot(dest.parent) == before


def test_the_current_folder_and_a_mount_point_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match=r"is the current folder.* Name a folder inside it"):
        check_free(Path.cwd(), True)
    with pytest.raises(FileExistsError, match="is a mount point"):
        check_free(Path("/"), True)
