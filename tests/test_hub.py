"""The fake Hub treats the real huggingface_hub client as the Hub would, also where it refuses."""

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
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from support.fake_hub import Hub, Repository, Request, connect


FILES = {
    "README.md": b"---\nlicense: apache-2.0\nlibrary_name: diffllama\npipeline_tag: text-generation\n---\n# Model",
    "config.json": b'{"version": 1}',
    "empty.bin": b"",
    "nested/deeper/text.txt": b"text",
    "nested/more.bin": b"more",
    "small.safetensors": b"small",
}
LFS = {"nested/more.bin", "small.safetensors"}


@pytest.fixture(autouse=True)
def connected(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of this process talks to the fake Hub, as nobody unless a token is given."""
    connect(hub, tmp_path, monkeypatch)
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def alice() -> HfApi:
    return HfApi(token="hf_alice")


@pytest.fixture
def model(hub: Hub, alice: HfApi, tmp_path: Path) -> Repository:
    """A repository of alice's, to which she has uploaded a folder."""
    for path, content in FILES.items():
        (tmp_path / "folder" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / path).write_bytes(content)
    alice.create_repo("alice/model")
    alice.upload_folder(repo_id="alice/model", folder_path=tmp_path / "folder", commit_message="Add weights")
    return hub.repositories["alice/model"]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_upload_is_one_commit_with_weights_in_lfs(hub: Hub, model: Repository) -> None:
    initial, commit = model.commits
    assert (commit.parent, commit.title) == (initial, "Add weights")
    assert model.files() == FILES | model.files(initial.oid)
    assert {path for path, blob in commit.files.items() if blob.lfs} == LFS


def test_token_goes_to_the_hub_but_not_to_the_storage(hub: Hub, model: Repository) -> None:
    uploads = [request for request in hub.requests if request.path.startswith("/storage/")]
    assert {request.user for request in uploads} == {None}
    assert len(uploads) == len(LFS)
    commits = [request for request in hub.requests if "/commit/" in request.path]
    assert {request.user for request in commits} == {"alice"}


def test_object_ids_are_those_of_git(model: Repository) -> None:
    files = model.commits[1].files  # git hash-object
    assert files["empty.bin"].oid == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert files["nested/deeper/text.txt"].oid == "f3a34851d44d6b97c90fbb99dd3d18c261b9a237"


def test_info_and_tree_describe_a_revision(alice: HfApi, model: Repository) -> None:
    initial, commit = model.commits
    info = alice.model_info("alice/model")
    assert (info.sha, info.private, info.library_name, info.pipeline_tag) == (
        *(commit.oid, False),
        *("diffllama", "text-generation"),
    )
    assert {sibling.rfilename for sibling in info.siblings} == set(model.files())
    assert alice.model_info("alice/model", revision=initial.oid[:7]).sha == initial.oid
    tree = {entry.path: (entry.size, entry.blob_id) for entry in alice.list_repo_tree("alice/model", recursive=True)}
    assert tree == {path: (blob.size, blob.oid) for path, blob in commit.files.items()}


def bob() -> HfApi:
    return HfApi(token="hf_bob")


ADD: dict[str, Any] = {"path_or_fileobj": b"0", "path_in_repo": "file", "repo_id": "alice/model"}
WRITE = [CommitOperationAdd("file", b"0")]
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], int]] = {
    "repository exists": (lambda: HfApi(token="hf_alice").create_repo("alice/model"), HfHubHTTPError, 409),
    "namespace of another user": (lambda: bob().create_repo("alice/other"), HfHubHTTPError, 403),
    "creation without a token": (lambda: HfApi().create_repo("alice/other"), HfHubHTTPError, 401),
    "upload without a token": (lambda: HfApi().upload_file(**ADD), RepositoryNotFoundError, 401),
    "upload by another user": (lambda: bob().upload_file(**ADD), HfHubHTTPError, 403),
    "invalid token": (lambda: HfApi(token="garbage").model_info("alice/model"), HfHubHTTPError, 401),
    "private repository without a token": (lambda: hf_hub_download("alice/secret", "x"), RepositoryNotFoundError, 401),
    "private repository of another user": (lambda: bob().model_info("alice/secret"), RepositoryNotFoundError, 404),
    "no such repository": (lambda: hf_hub_download("alice/missing", "x"), RepositoryNotFoundError, 401),
    "no such file": (lambda: hf_hub_download("alice/model", "missing"), RemoteEntryNotFoundError, 404),
    "no such revision": (
        lambda: hf_hub_download("alice/model", "config.json", revision="missing"), RevisionNotFoundError, 404
    ),
    "deletion of a missing file": (
        lambda: HfApi(token="hf_alice").delete_file("missing", "alice/model"), RemoteEntryNotFoundError, 404
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


def test_commit_on_an_outdated_parent_is_refused(alice: HfApi, model: Repository) -> None:
    with pytest.raises(HfHubHTTPError, match="412"):
        alice.create_commit("alice/model", WRITE, commit_message="x", parent_commit=model.commits[0].oid)


def test_pull_request_is_open_to_everybody_and_leaves_main_alone(model: Repository) -> None:
    commit = bob().create_commit("alice/model", WRITE, commit_message="x", create_pr=True)
    assert commit.pr_revision == "refs/pr/1"
    assert model.files("refs/pr/1") == model.files() | {"file": b"0"}
    assert "file" not in model.files()
    refs = bob().list_repo_refs("alice/model", include_pull_requests=True)
    assert [ref.target_commit for ref in refs.pull_requests] == [commit.oid]


@pytest.mark.parametrize(
    ("front", "message"),
    [
        ("tags: [", "Invalid YAML"),
        ("base_model: /home/alice/model", "'/home/alice/model' is not valid"),
        ("- 1", "must be a mapping"),
    ],
)
def test_invalid_metadata_is_refused(front: str, message: str, alice: HfApi, model: Repository) -> None:
    card = f"---\n{front}\n---\n".encode()
    with pytest.raises(ValueError, match=message):
        alice.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="alice/model")


def test_downloads_resume_by_ranges(hub: Hub) -> None:
    hub.create("alice/model").commit({"digits": b"0123456789"})
    address = f"{hub.endpoint}/alice/model/resolve/main/digits"
    with urlopen(Query(address, headers={"Range": "bytes=7-"})) as answer:
        assert (answer.status, answer.headers["Content-Range"], answer.read()) == (206, "bytes 7-9/10", b"789")
    with pytest.raises(HTTPError, match="416"):
        urlopen(Query(address, headers={"Range": "bytes=10-"}))


def test_lfs_object_must_match_its_hash(hub: Hub) -> None:
    repository = hub.create("alice/model")
    with pytest.raises(HTTPError, match="400"):
        urlopen(Query(f"{hub.storage}/alice/model/{sha256(b'weights')}", b"other bytes", method="PUT"))
    assert repository.objects == {}


def test_unknown_request_is_status_501() -> None:
    with Hub() as hub:
        with pytest.raises(HTTPError, match="501") as error:
            urlopen(f"{hub.endpoint}/api/spaces/alice/space")
        assert "does not know" in json.loads(error.value.read())["error"]
        assert hub.requests == [Request("GET", "/api/spaces/alice/space", None, None, 501)]


def test_processes_get_no_token_and_no_proxy_of_ours(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN", "https_proxy", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "ours")
    assert "ours" not in hub.environment(tmp_path).values()
    assert hub.environment(tmp_path, "hf_alice")["HF_TOKEN"] == "hf_alice"
