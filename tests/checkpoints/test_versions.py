"""The package's commit."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffllama.checkpoints import versions


class TestCommit:
    @pytest.fixture(autouse=True)
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        (tmp_path / "modeling_diff").mkdir()
        (tmp_path / "modeling_diff" / "a.py").touch()
        monkeypatch.setattr(versions, "SOURCE", tmp_path / "modeling_diff")
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        versions.commit.cache_clear()
        yield tmp_path
        versions.commit.cache_clear()

    def git(self, package: Path, *arguments: str) -> str:
        name = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        return subprocess.run(
            ["git", "-C", package, *name, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    def test_clone_asks_git_and_says_whether_the_code_was_changed(self, package: Path) -> None:
        self.git(package, "init", "-q")
        self.git(package, "add", ".")
        self.git(package, "commit", "-qm", "a")
        head = self.git(package, "rev-parse", "HEAD")
        assert versions.commit() == head
        (package / "modeling_diff" / "a.py").write_text("x = 1\n")
        versions.commit.cache_clear()
        assert versions.commit() == f"{head} with changes"

    def test_package_that_lies_in_somebody_elses_clone_does_not_take_its_commit(self, package: Path) -> None:
        self.git(package, "init", "-q")
        self.git(package, "commit", "-qm", "empty", "--allow-empty")
        (package / "_commit.txt").write_text("built of this\n")
        assert versions.commit() == "built of this"

    def test_installation_from_a_repository_knows_its_commit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Distribution:
            def read_text(self, name: str) -> str:
                assert name == "direct_url.json"
                return json.dumps({"url": "https://example.org", "vcs_info": {"vcs": "git", "commit_id": "0123"}})

        monkeypatch.setattr(versions, "distribution", lambda name: Distribution())
        assert versions.commit() == "0123"
