"""The Hub of the tests does what the real huggingface_hub client expects of one."""

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request as Query
from urllib.request import urlopen

import pytest

from support.fake_hub import Hub, Repository, Request


PRELUDE = """
import json, sys
import huggingface_hub
from huggingface_hub import _CACHED_NO_EXIST, HfApi, ModelCard
from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from pathlib import Path

facts = {}

def error(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        return [type(error).__name__, status, str(error)]

def files(folder):
    found = [f for f in Path(folder).rglob("*") if f.is_file()]
    return {f.relative_to(folder).as_posix(): f.stat().st_size for f in found}

def lfs(entry):
    return entry.lfs and [entry.lfs.sha256, entry.lfs.size]
"""

PUSH = """
api = HfApi()
url = api.create_repo("alice/model")
facts["created"] = [str(url), url.repo_id]
facts["push"] = error(api.upload_folder, repo_id="alice/model", folder_path=sys.argv[1])
"""

ALICE = """
api, folder = HfApi(), Path(sys.argv[1])
facts["user"] = api.whoami()["name"]
facts["created again"] = api.create_repo("alice/model", exist_ok=True).repo_id
facts["exists"] = error(api.create_repo, "alice/model")
facts["foreign namespace"] = error(api.create_repo, "bob/model")
facts["private"] = api.model_info(api.create_repo("alice/own", private=True).repo_id).private

message = {"commit_message": "Add weights", "commit_description": "All of them."}
pushed = api.upload_folder(repo_id="alice/model", folder_path=folder, **message)
again = api.upload_folder(repo_id="alice/model", folder_path=folder)
facts["pushed"], facts["pushed again"] = [pushed.oid, str(pushed)], again.oid

(folder / "config.json").write_text('{"version": 2}')
changed = api.upload_folder(
    repo_id="alice/model", folder_path=folder, ignore_patterns="nested/*", delete_patterns=["nested/*.txt", "*.md"]
)
facts["changed"] = changed.oid
facts["stale"] = error(
    api.upload_file, path_or_fileobj=b"", path_in_repo="a", repo_id="alice/model", parent_commit=pushed.oid
)
facts["delete what is not there"] = error(api.delete_file, "missing", "alice/model")

proposed = api.upload_file(path_or_fileobj=b"1", path_in_repo="one.txt", repo_id="alice/model", create_pr=True)
facts["proposed"] = [proposed.pr_url, proposed.pr_num]
for revision in (proposed.pr_revision, "some/branch"):
    if revision == "some/branch":
        api.create_branch("alice/model", branch=revision, revision=pushed.oid)
    api.upload_file(path_or_fileobj=b"2", path_in_repo="two.txt", repo_id="alice/model", revision=revision)
api.create_tag("alice/model", tag="v1", revision=pushed.oid)
facts["same branch"] = error(api.create_branch, "alice/model", branch="some/branch")
refs = api.list_repo_refs("alice/model", include_pull_requests=True)
kinds = {"branches": refs.branches, "tags": refs.tags, "pull requests": refs.pull_requests}
facts["refs"] = {kind: {ref.name: [ref.ref, ref.target_commit] for ref in found} for kind, found in kinds.items()}

for repository in ("model", "secret"):
    info = api.model_info(f"alice/{repository}", files_metadata=True)
    siblings = {file.rfilename: [file.size, file.blob_id, lfs(file)] for file in info.siblings}
    facts[f"{repository} info"] = [info.id, info.sha, info.private, info.library_name, siblings]
facts["info"] = {rev: api.model_info("alice/model", revision=rev).sha for rev in ("v1", "refs/pr/1", pushed.oid[:7])}
facts["expanded"] = api.model_info("alice/model", expand=["sha"]).siblings
tree = list(api.list_repo_tree("alice/model", revision="v1", recursive=True))
facts["tree"] = {entry.path: [entry.size, lfs(entry)] for entry in tree if hasattr(entry, "size")}
facts["folders"] = [entry.path for entry in tree if not hasattr(entry, "size")]
facts["top"] = [entry.path for entry in api.list_repo_tree("alice/model", revision="v1")]
facts["nested"] = [entry.path for entry in api.list_repo_tree("alice/model", "nested", revision="v1")]
facts["no folder"] = error(lambda: list(api.list_repo_tree("alice/model", "missing")))
paths = api.get_paths_info("alice/model", ["nested", "missing", "README.md"], revision="v1")
facts["paths"] = [entry.path for entry in paths]

if huggingface_hub.__version__.startswith("1."):
    ModelCard.validate = lambda *_, **__: None  # it asks huggingface.co, whatever HF_ENDPOINT says
card = "---\\nlibrary_name: diffllama\\npipeline_tag: text-generation\\ntags: [a]\\n---\\n# Card"
ModelCard(card).push_to_hub("alice/model")
info = api.model_info("alice/model")
facts["card"] = [info.card_data.pipeline_tag, info.pipeline_tag, info.library_name, info.tags]
facts["bad cards"] = [
    error(api.upload_file, path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id="alice/model")
    for text in ("---\\ntags: [\\n---\\n", "---\\nbase_model: /home/alice/model\\n---\\n", "---\\n- 1\\n---\\n")
]
facts["secret"] = Path(hf_hub_download("alice/secret", "weights.bin")).read_text()
"""

STRANGER = """
old, new = sys.argv[1:]
facts["snapshot"] = files(snapshot_download("alice/model", revision=new))
facts["main"] = [snapshot_download("alice/model"), snapshot_download("alice/model")]
facts["old"] = Path(hf_hub_download("alice/model", "config.json", revision=old)).read_text()
facts["branch"] = Path(hf_hub_download("alice/model", "two.txt", revision="some/branch")).read_text()
facts["no file"] = error(hf_hub_download, "alice/model", "missing")
facts["no revision"] = error(hf_hub_download, "alice/model", "config.json", revision="missing")
facts["no repository"] = error(hf_hub_download, "alice/missing", "config.json")
facts["private file"] = error(hf_hub_download, "alice/secret", "weights.bin")
facts["private snapshot"] = error(snapshot_download, "alice/secret")

file = {"path_or_fileobj": b"0", "path_in_repo": "file", "repo_id": "alice/model"}
facts["anonymous"] = [error(HfApi().create_repo, "alice/new"), error(HfApi().upload_file, **file)]
facts["wrong token"] = error(HfApi(token="garbage").model_info, "alice/model")
bob = HfApi(token="hf_bob")
facts["private to bob"] = error(bob.model_info, "alice/secret")
facts["upload by bob"] = error(bob.upload_file, **file)
facts["proposed by bob"] = bob.upload_file(**file, create_pr=True).pr_revision
"""

OFFLINE = """
facts["main"] = [snapshot_download("alice/model"), hf_hub_download("alice/model", "config.json")]
facts["remembered"] = try_to_load_from_cache("alice/model", "missing") is _CACHED_NO_EXIST
facts["not loaded"] = error(hf_hub_download, "alice/model", "one.txt", revision="refs/pr/1")
"""


@dataclass
class Session:
    """What client processes found out, one after the other, and what they asked for meanwhile."""

    hub: Hub
    home: Path
    facts: dict[str, Any] = field(default_factory=dict)
    requests: dict[str, list[Request]] = field(default_factory=dict)

    def run(self, name: str, code: str, *arguments: object, token: str | None = None, offline: str = "0") -> None:
        before = len(self.hub.requests)
        env = self.hub.environment(self.home / (token or "stranger"), token) | {"HF_HUB_OFFLINE": offline}
        command = [sys.executable, "-c", f"{PRELUDE}{code}\nprint(json.dumps(facts))", *map(str, arguments)]
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120}
        process = subprocess.run(command, env=env, check=False, **options)
        assert process.returncode == 0, process.stderr
        self.facts[name] = json.loads(process.stdout)
        self.requests[name] = self.hub.requests[before:]

    def asked(self, name: str, method: str, part: str = "") -> list[Request]:
        return [request for request in self.requests[name] if request.method == method and part in request.path]

    @property
    def model(self) -> Repository:
        return self.hub.repositories["alice/model"]


FILES = {
    "README.md": b"---\nlicense: apache-2.0\n---\n# Model",
    "config.json": b'{"version": 1}',
    "empty.bin": b"",
    "large.safetensors": random.Random(0).randbytes(12_000_000),
    "nested/deeper/text.txt": b"text",
    "nested/more.bin": b"more",
    "small.safetensors": b"small",
}
LFS = {path for path in FILES if path.endswith((".bin", ".safetensors"))} - {"empty.bin"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A push that is interrupted, its owner's session, a stranger's, and the stranger's without network."""
    folder = tmp_path_factory.mktemp("folder")
    for path, content in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    with Hub() as hub:
        session = Session(hub, tmp_path_factory.mktemp("home"))
        hub.create("alice/secret", private=True).commit({"weights.bin": b"secret"}, "Add weights")
        hub.refuse_uploads_after = 1
        session.run("interrupted", PUSH, folder, token="hf_alice")
        hub.refuse_uploads_after = None
        session.run("alice", ALICE, folder, token="hf_alice")
        hub.cut_after = 11_000_000
        session.run("stranger", STRANGER, *(session.model.commits[i].oid for i in (1, 2)))
        session.run("offline", OFFLINE, offline="1")
        yield session


class TestClient:
    def test_it_asks_nothing_that_the_hub_does_not_know(self, session: Session) -> None:
        assert [request for request in session.hub.requests if request.status == 501] == []

    def test_it_sends_its_token_to_the_hub_but_not_to_the_storage(self, session: Session) -> None:
        users = {"storage": set(), "hub": set()}
        for request in session.requests["alice"]:
            if request.path != "/api/validate-yaml":  # asked with and without
                users["storage" if request.path.startswith("/storage/") else "hub"].add(request.user)
        assert users == {"storage": {None}, "hub": {"alice"}}


class TestPush:
    def test_a_repository_is_created_once_and_only_in_ones_own_namespace(self, session: Session) -> None:
        assert session.facts["interrupted"]["created"] == [f"{session.hub.endpoint}/alice/model", "alice/model"]
        facts = session.facts["alice"]
        assert (facts["user"], facts["created again"], facts["private"]) == ("alice", "alice/model", True)
        assert facts["exists"][:2] == ["HfHubHTTPError", 409]
        assert facts["foreign namespace"][:2] == ["HfHubHTTPError", 403]

    def test_an_interrupted_push_leaves_no_commit_and_its_second_try_sends_only_what_is_missing(
        self, session: Session
    ) -> None:
        assert session.facts["interrupted"]["push"][0] == "RuntimeError"
        assert session.asked("interrupted", "POST", "/commit/") == []
        first, second = (session.asked(name, "PUT", "/storage/alice/model/") for name in ("interrupted", "alice"))
        (arrived,) = [request.path for request in first if request.status == 200]
        assert {request.status for request in first} == {200, 403}
        assert {request.status for request in second} == {200}
        assert sorted([arrived, *(request.path for request in second)]) == sorted(
            f"/storage/alice/model/{sha256(FILES[path])}" for path in LFS
        )

    def test_a_folder_arrives_whole_in_one_commit_with_its_weights_in_lfs(self, session: Session) -> None:
        initial, commit = session.model.commits[:2]
        url = f"{session.hub.endpoint}/alice/model/commit/{commit.oid}"
        assert session.facts["alice"]["pushed"] == [commit.oid, url]
        assert (commit.parent, commit.title, commit.description) == (initial, "Add weights", "All of them.")
        assert session.model.files(commit.oid) == FILES | session.model.files(initial.oid)
        assert {path for path, blob in commit.files.items() if blob.lfs} == LFS

    def test_a_folder_without_changes_makes_no_commit(self, session: Session) -> None:
        facts = session.facts["alice"]
        assert facts["pushed again"] == facts["pushed"][0]

    def test_changes_and_deletions_are_one_commit(self, session: Session) -> None:
        before, after = session.model.commits[1:3]
        assert session.facts["alice"]["changed"] == after.oid
        assert after.parent is before
        expected = session.model.files(before.oid) | {"config.json": b'{"version": 2}'}
        del expected["nested/deeper/text.txt"]
        assert session.model.files(after.oid) == expected

    def test_a_commit_on_another_parent_or_that_deletes_nothing_is_refused(self, session: Session) -> None:
        facts = session.facts["alice"]
        assert facts["stale"][:2] == ["HfHubHTTPError", 412]
        assert facts["delete what is not there"][:2] == ["RemoteEntryNotFoundError", 404]

    def test_pull_requests_and_branches_leave_main_alone(self, session: Session) -> None:
        facts, model = session.facts["alice"], session.model
        pushed, changed = facts["pushed"][0], facts["changed"]
        assert facts["proposed"] == [f"{session.hub.endpoint}/alice/model/discussions/1", 1]
        assert model.files("refs/pr/1") == model.files(changed) | {"one.txt": b"1", "two.txt": b"2"}
        assert model.files("some/branch") == model.files(pushed) | {"two.txt": b"2"}
        assert facts["same branch"][:2] == ["HfHubHTTPError", 409]
        branch, proposal = (model.refs[name] for name in ("some/branch", "refs/pr/1"))
        assert facts["refs"] == {
            "branches": {"main": ["refs/heads/main", changed], "some/branch": ["refs/heads/some/branch", branch]},
            "tags": {"v1": ["refs/tags/v1", pushed]},
            "pull requests": {"refs/pr/1": ["refs/pr/1", proposal]},
        }

    def test_metadata_is_validated_and_read(self, session: Session) -> None:
        facts = session.facts["alice"]
        assert facts["card"] == ["text-generation", "text-generation", "diffllama", ["a"]]
        assert [kind for kind, *_ in facts["bad cards"]] == ["ValueError"] * 3
        messages = ("Invalid YAML", "'/home/alice/model' is not valid", "must be a mapping")
        for (*_, text), message in zip(facts["bad cards"], messages, strict=True):
            assert message in text
        assert session.model.files()["README.md"].endswith(b"# Card")


class TestQuestions:
    @pytest.mark.parametrize(("name", "library"), [("model", "transformers"), ("secret", None)])
    def test_info_tells_commit_files_and_privacy(self, session: Session, name: str, library: str | None) -> None:
        repository = session.hub.repositories[f"alice/{name}"]
        commit = repository.commits[{"model": 2, "secret": 1}[name]]
        files = {
            path: [blob.size, blob.oid, [blob.sha256, blob.size] if blob.lfs else None]
            for path, blob in commit.files.items()
        }
        told = [repository.name, commit.oid, name == "secret", library, files]
        assert session.facts["alice"][f"{name} info"] == told

    def test_info_is_of_any_revision_and_of_what_is_asked_for(self, session: Session) -> None:
        facts = session.facts["alice"]
        pushed = facts["pushed"][0]
        assert facts["info"] == {"v1": pushed, pushed[:7]: pushed, "refs/pr/1": session.model.refs["refs/pr/1"]}
        assert facts["expanded"] is None

    def test_oids_are_gits(self, session: Session) -> None:
        files = session.model.commits[1].files  # git hash-object
        assert files["empty.bin"].oid == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
        assert files["nested/deeper/text.txt"].oid == "f3a34851d44d6b97c90fbb99dd3d18c261b9a237"

    def test_trees_are_listed_at_all_depths(self, session: Session) -> None:
        facts = session.facts["alice"]
        expected = {
            path: [len(content), [sha256(content), len(content)] if path in LFS else None]
            for path, content in FILES.items()
        }
        assert {path: told for path, told in facts["tree"].items() if path != ".gitattributes"} == expected
        assert facts["folders"] == ["nested", "nested/deeper"]
        assert set(facts["top"]) == {".gitattributes", "nested"} | {path for path in FILES if "/" not in path}
        assert facts["nested"] == ["nested/deeper", "nested/more.bin"]
        assert facts["no folder"][:2] == ["RemoteEntryNotFoundError", 404]
        assert facts["paths"] == ["nested", "README.md"]


class TestDownloads:
    def test_a_snapshot_is_whole_and_is_not_loaded_again(self, session: Session) -> None:
        facts = session.facts["stranger"]
        main, again = facts["main"]
        assert main == again
        assert facts["snapshot"] == {path: blob.size for path, blob in session.model.commits[2].files.items()}
        assert len(session.asked("stranger", "GET", f"/storage/alice/model/{sha256(FILES['small.safetensors'])}")) == 1

    def test_a_download_that_is_cut_goes_on_where_the_client_has_written_it(self, session: Session) -> None:
        path = f"/storage/alice/model/{sha256(FILES['large.safetensors'])}"
        requests = session.asked("stranger", "GET", path)
        written = 10 * 2**20  # the client writes 10 MiB at a time, and has lost the rest
        assert [(request.range, request.status) for request in requests] == [(None, 200), (f"bytes={written}-", 206)]
        assert session.hub.cut_after is None

    def test_old_commits_and_branches_have_their_own_files(self, session: Session) -> None:
        facts = session.facts["stranger"]
        assert (facts["old"], facts["branch"]) == ('{"version": 1}', "2")

    def test_what_is_missing_raises_the_clients_own_exceptions(self, session: Session) -> None:
        facts = session.facts["stranger"]
        assert facts["no file"][:2] == ["RemoteEntryNotFoundError", 404]
        assert facts["no revision"][:2] == ["RevisionNotFoundError", 404]
        assert facts["no repository"][:2] == ["RepositoryNotFoundError", 401]

    def test_what_is_in_the_cache_needs_no_network(self, session: Session) -> None:
        facts, (main, _) = session.facts["offline"], session.facts["stranger"]["main"]
        assert facts["main"] == [main, f"{main}/config.json"]
        assert facts["remembered"]
        assert facts["not loaded"][0] == "LocalEntryNotFoundError"
        assert session.requests["offline"] == []


class TestRights:
    def test_private_repositories_are_their_owners_alone(self, session: Session) -> None:
        assert session.facts["alice"]["secret"] == "secret"
        facts = session.facts["stranger"]
        for name, status in (("private file", 401), ("private snapshot", 401), ("private to bob", 404)):
            assert facts[name][:2] == ["RepositoryNotFoundError", status]

    def test_only_the_owner_writes_but_all_users_propose(self, session: Session) -> None:
        facts = session.facts["stranger"]
        assert [told[:2] for told in facts["anonymous"]] == [["HfHubHTTPError", 401], ["RepositoryNotFoundError", 401]]
        assert facts["wrong token"][:2] == ["HfHubHTTPError", 401]
        assert facts["upload by bob"][:2] == ["HfHubHTTPError", 403]
        assert facts["proposed by bob"] == "refs/pr/2"
        assert session.model.files("refs/pr/2") == session.model.files(session.model.refs["main"]) | {"file": b"0"}


class TestServer:
    def test_a_client_gets_no_token_and_no_proxy_but_what_it_is_given(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN", "https_proxy", "TRANSFORMERS_OFFLINE"):
            monkeypatch.setenv(name, "ours")
        assert "ours" not in hub.environment(tmp_path).values()
        assert hub.environment(tmp_path, "hf_alice")["HF_TOKEN"] == "hf_alice"

    @pytest.mark.parametrize(
        ("wanted", "first", "last"), [("2-4", 2, 4), ("7-", 7, 9), ("8-99", 8, 9), ("-3", 7, 9), ("-99", 0, 9)]
    )
    def test_ranges_are_served(self, hub: Hub, wanted: str, first: int, last: int) -> None:
        hub.create("alice/model").commit({"digits": b"0123456789"})
        query = Query(f"{hub.endpoint}/alice/model/resolve/main/digits", headers={"Range": f"bytes={wanted}"})
        with urlopen(query) as answer:
            assert (answer.status, answer.headers["Content-Range"]) == (206, f"bytes {first}-{last}/10")
            assert answer.read() == b"0123456789"[first : last + 1]

    def test_a_range_after_the_end_is_refused(self, hub: Hub) -> None:
        hub.create("alice/model").commit({"digits": b"0123456789"})
        query = Query(f"{hub.endpoint}/alice/model/resolve/main/digits", headers={"Range": "bytes=10-"})
        with pytest.raises(HTTPError, match="416"):
            urlopen(query)

    def test_an_lfs_object_must_be_what_its_name_says(self, hub: Hub) -> None:
        repository = hub.create("alice/model")
        with pytest.raises(HTTPError, match="400"):
            urlopen(Query(f"{hub.storage}/alice/model/{sha256(b'weights')}", b"other bytes", method="PUT"))
        assert repository.objects == {}

    def test_what_it_does_not_know_it_says_so(self) -> None:
        with Hub() as hub:
            with pytest.raises(HTTPError, match="501"):
                urlopen(f"{hub.endpoint}/api/spaces/alice/space")
            assert hub.requests == [Request("GET", "/api/spaces/alice/space", None, None, 501)]
