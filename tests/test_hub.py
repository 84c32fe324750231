"""Behaviour of the fake Hub that tests with the real client (test_upload, test_publishing) do not check."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request as Query
from urllib.request import urlopen

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from support.fake_hub import Hub, Repository, Request, connect


FILES = {"empty.bin": b"", "nested/deeper/text.txt": b"text", "nested/more.bin": b"more"}
WRITE = [CommitOperationAdd("file", b"0")]


@pytest.fixture
def model(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Alice's repository. The client of this process has no token unless a test passes one."""
    connect(hub, tmp_path, monkeypatch)
    monkeypatch.delenv("HF_TOKEN")
    repository = hub.create("alice/model")
    repository.commit(FILES)
    return repository


def client(user: str) -> HfApi:
    return HfApi(token=f"hf_{user}")


def test_object_ids_are_those_of_git(model: Repository) -> None:
    files = model.find().files  # git hash-object
    assert files["empty.bin"].oid == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert files["nested/deeper/text.txt"].oid == "f3a34851d44d6b97c90fbb99dd3d18c261b9a237"
    tree = {entry.path: (entry.size, entry.blob_id) for entry in client("bob").list_repo_tree("alice/model", "nested")}
    assert tree == {path: (blob.size, blob.oid) for path, blob in files.items() if path.startswith("nested/")}


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], int]] = {
    "creation without a token": (lambda: HfApi().create_repo("alice/other"), HfHubHTTPError, 401),
    "upload without a token": (
        lambda: HfApi().create_commit("alice/model", WRITE, commit_message="x"), RepositoryNotFoundError, 401
    ),
    "upload by another user": (
        lambda: client("bob").create_commit("alice/model", WRITE, commit_message="x"), HfHubHTTPError, 403
    ),
    "private repository without a token": (lambda: hf_hub_download("alice/secret", "x"), RepositoryNotFoundError, 401),
    "private repository of another user": (
        lambda: client("bob").model_info("alice/secret"), RepositoryNotFoundError, 404
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refusal_is_the_clients_own_exception(what: str, hub: Hub, model: Repository) -> None:
    hub.create("alice/secret", private=True).commit({"x": b"1"})
    attempt, error_type, status = REFUSED[what]
    with pytest.raises(error_type) as error:
        attempt()
    assert error.value.response.status_code == status
    assert len(model.commits) == 2


def test_lfs_object_must_match_its_hash(hub: Hub) -> None:
    repository = hub.create("alice/model")
    address = f"{hub.storage}/alice/model/{hashlib.sha256(b'weights').hexdigest()}"
    with pytest.raises(HTTPError, match="400"):
        urlopen(Query(address, b"other bytes", method="PUT"))
    assert repository.objects == {}


def test_unknown_request_is_status_501() -> None:
    with Hub() as hub:
        with pytest.raises(HTTPError, match="501") as error:
            urlopen(f"{hub.endpoint}/api/spaces/alice/space")
        assert "does not know" in json.loads(error.value.read())["error"]
        assert hub.requests == [Request("GET", "/api/spaces/alice/space", 501)]


def test_processes_get_no_token_and_no_proxy_of_ours(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN", "https_proxy", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "ours")
    assert "ours" not in hub.environment(tmp_path).values()
    assert hub.environment(tmp_path, "hf_alice")["HF_TOKEN"] == "hf_alice"
