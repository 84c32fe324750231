"""Sources are located, and files are replaced completely or not at all."""

import os
from pathlib import Path
from typing import Any

import pytest

from diffllama.checkpoints.files import locate, locked, replace_file


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Requests to a Hub that has only the repository some/model."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        if name != "some/model":
            raise OSError("no such repository")
        return "/hub/snapshot"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return calls


@pytest.mark.parametrize("name", ["here", "folder/here", "not here", "folder/deeper/not_here", "./not_here", ""])
def test_paths_are_made_absolute(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "folder/here"):
        (tmp_path / folder).mkdir(parents=True)
    assert locate(name, None, []) == Path(os.path.normpath(tmp_path / name))
    with pytest.raises(ValueError, match="`revision` is only for a repository of the Hub"):
        locate(name, "main", [])
    assert asked == []


def test_repository_is_downloaded(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("some/model", "v1", ("*.json",)) == Path("/hub/snapshot")
    ((name, options),) = asked
    assert name == "some/model"
    assert (options["revision"], options["allow_patterns"]) == ("v1", ["*.json"])
    with pytest.raises(FileNotFoundError, match=r"other/model does not exist, and .* no such repository"):
        locate("other/model", None, [])


def test_file_is_replaced_in_one_step_and_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = []

    def replace(new: str, file: Path, replace: Any = os.replace) -> None:
        assert (Path(new).read_text(encoding="utf-8"), file.read_text()) == ("ä2\n", "1")
        replaced.append(file)
        replace(new, file)

    file = tmp_path / "folder" / "file"
    replace_file(file, b"1")
    file.with_name("other").touch()
    assert file.stat().st_mode == file.with_name("other").stat().st_mode
    file.chmod(0o600)
    monkeypatch.setattr(os, "replace", replace)
    replace_file(file, "ä2\n")
    assert replaced == [file]
    assert file.read_bytes() == "ä2\n".encode()
    assert file.stat().st_mode & 0o777 == 0o600


def test_file_that_cannot_be_replaced_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*paths: Any) -> None:
        raise OSError("the disk is full")

    file = tmp_path / "file"
    file.write_text("1")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        replace_file(file, "2")
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"file": "1"}


def test_leftover_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    left, others = (
        tmp_path / f".file.{child}.tmp",
        [tmp_path / f".file.{os.getppid()}.tmp", tmp_path / ".file.mine.tmp"],
    )
    for path in (left, *others):
        path.touch()
    replace_file(tmp_path / "file", "new")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "file", *others])


def test_lock_keeps_others_out_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with locked(folder, "name another"):
        says = r"Another run is writing into .*run: wait until it ends, or name another\."
        with pytest.raises(ValueError, match=says), locked(folder, "name another"):
            pass
        (folder / "written").touch()
    assert os.listdir(folder) == ["written"]
    (folder / ".lock").touch()  # left by a killed run
    with pytest.raises(KeyError), locked(folder, "name another"):
        raise KeyError
    assert os.listdir(folder) == ["written"]
    with locked(tmp_path / "empty" / "run", "name another"):
        pass
    assert os.listdir(tmp_path) == ["a"]


def test_links_that_lead_nowhere_are_no_repositories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    for target in ("nowhere", "model"):
        (tmp_path / "some" / "model").symlink_to(target)
        with pytest.raises(FileNotFoundError, match=f"some/model is a link to {target}, which does not exist or leads"):
            locate("some/model", None, [])
        (tmp_path / "some" / "model").unlink()
    assert asked == []
