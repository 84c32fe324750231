"""A fake Hub on the loopback interface, for tests with the real huggingface_hub client in this or another process.

It answers the requests about model repositories that the tests need, with LFS instead of Xet, and keeps everything in
memory. The token "hf_alice" is that of the user alice. A repository belongs to the user before its slash. Nobody else
may write to it, or read it if it is private, but everybody may open pull requests. Unknown requests get status 501.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants


LFS_SUFFIXES = (".bin", ".gguf", ".h5", ".model", ".onnx", ".pt", ".safetensors")


class Refusal(Exception):
    """An error response. The client chooses its exception by the code."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | headers


# --- repositories ---------------------------------------------------------------------------------------------------


class Blob:
    """A file: stored in git, or as a pointer to an LFS object."""

    def __init__(self, path: str, content: bytes):
        self.content, self.size, self.sha256 = content, len(content), hashlib.sha256(content).hexdigest()
        self.lfs = path.endswith(LFS_SUFFIXES) and self.size > 0
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize %d\n"
        stored = pointer % (self.sha256.encode(), self.size) if self.lfs else content
        self.oid = hashlib.sha1(b"blob %d\0%b" % (len(stored), stored)).hexdigest()  # as git computes it
        # The name of the file in the client's cache. The client does not upload a file that has the same name there.
        self.etag = self.sha256 if self.lfs else self.oid


@dataclass(frozen=True)
class Commit:
    """A state of all files."""

    oid: str
    parent: "Commit | None"
    files: Mapping[str, Blob]


class Repository:
    """A model repository.

    Attributes:
        commits: oldest first.
        refs: name, such as "main", "any-branch", "refs/pr/1" or "refs/tags/v1" -> oid of a commit.
        objects: SHA-256 -> LFS object.
        authors: ref of a pull request -> its author, who may write to it.
    """

    def __init__(self, name: str, private: bool = False):
        self.name, self.private, self.owner = name, private, name.split("/")[0]
        self.commits: list[Commit] = []
        self.refs: dict[str, str] = {}
        self.objects: dict[str, bytes] = {}
        self.authors: dict[str, str | None] = {}
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)
        self.commit({".gitattributes": attributes.encode()})

    def find(self, revision: str = "main") -> Commit:
        """Return the commit of a branch, a pull request, a tag or an oid."""
        oid = self.refs.get(revision, revision)
        for commit in self.commits:
            if commit.oid == oid:
                return commit
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.content for path, blob in self.find(revision).files.items()}

    def commit(self, changes: Mapping[str, bytes | None], ref: str = "main", parent: Commit | None = None) -> Commit:
        """Add a commit after `parent`, by default the commit of `ref`, and move `ref` to it. None deletes a file."""
        parent = parent or (self.find(ref) if self.commits else None)
        files = dict(parent.files) if parent else {}
        for path, content in changes.items():
            files.pop(path, None)
            if content is not None:
                files[path] = Blob(path, content)
                if files[path].lfs:
                    self.objects[files[path].sha256] = content
        files = dict(sorted(files.items()))
        identity = repr((self.name, len(self.commits), [(path, blob.oid) for path, blob in files.items()]))
        self.refs[ref] = oid = hashlib.sha1(identity.encode()).hexdigest()
        self.commits.append(Commit(oid, parent, files))
        return self.commits[-1]


# --- the fixture ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request of a client, and the status of the response."""

    method: str
    path: str
    status: int


class Hub(ThreadingHTTPServer):
    """The server. `with Hub() as hub:` runs it until the end of the block.

    Attributes:
        endpoint: URL of the server.
        repositories: name, such as "alice/model" -> repository.
        requests: requests of clients, in order.
        refuse_uploads_after: number of LFS objects that are still accepted, `None` for no limit. Further ones are
            refused with status 403, which the client does not retry.
    """

    request_queue_size = 128  # clients download in several threads

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}/storage"  # another host, where clients send no token
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.refuse_uploads_after: int | None = None
        self.lock = threading.Lock()

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *about: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients may disconnect at any time
            super().handle_error(*about)

    def create(self, name: str, private: bool = False) -> Repository:
        """Create a repository with its first commit, as the Hub does."""
        self.repositories[name] = repository = Repository(name, private)
        return repository

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return the environment of a client process: this process's, with this Hub, a cache at `home` and `token`."""
        foreign = re.compile(r"(HF_|HUGGING|TRANSFORMERS_).*|.*_PROXY", re.IGNORECASE)
        return {name: value for name, value in os.environ.items() if not foreign.fullmatch(name)} | {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "*",
            **({"HF_TOKEN": token} if token else {}),
        }


def connect(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect the client of this process to a fake Hub as alice, with caches in `folder`."""
    for name, value in {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_alice")


# --- the server -----------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """A response. `data` is bytes, or anything else to send as JSON."""

    data: Any = b""
    status: int = 200
    headers: Mapping[str, object] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    """One connection. `user`, `query` and `sent` (the body) belong to the current request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body waits until the client has acknowledged the headers
    server: Hub

    def respond(self) -> None:
        hub, url = self.server, urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.user = self.headers.get("Authorization", "").removeprefix("Bearer hf_") or None
        with hub.lock:
            try:
                answer = self.route(*(unquote(part) for part in url.path.strip("/").split("/")))
            except Refusal as error:
                answer = Answer({"error": str(error)}, error.status, error.headers)
            except Exception:  # clients would retry after status 500
                answer = Answer({"error": traceback.format_exc()}, 501)
            body = answer.data if isinstance(answer.data, bytes) else json.dumps(answer.data).encode()
            hub.requests.append(Request(self.command, self.path, answer.status))
        self.send_response(answer.status)
        for name, value in {"Content-Length": len(body), **answer.headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = respond

    def log_message(self, *_: object) -> None:
        pass

    def route(self, *parts: str) -> Answer:
        match self.command, *parts:
            case "POST", "api", "validate-yaml":
                front = re.match(r"---\n(.*?)\n---\n", json.loads(self.sent)["content"], re.DOTALL)
                assert front is not None
                assert isinstance(yaml.safe_load(front[1]), dict)
                return Answer({"errors": [], "warnings": []})
            case "POST", "api", "repos", "create":
                return self.create(**json.loads(self.sent))
            case "GET", "api", "models", owner, name:
                return self.info(self.repository(f"{owner}/{name}"), "main")
            case "GET", "api", "models", owner, name, "revision", revision:
                return self.info(self.repository(f"{owner}/{name}"), revision)
            case "GET", "api", "models", owner, name, "refs":
                return self.refs(self.repository(f"{owner}/{name}"))
            case "GET", "api", "models", owner, name, "tree", revision, *folder:
                return self.tree(self.repository(f"{owner}/{name}"), revision, "/".join(folder))
            case "POST", "api", "models", owner, name, "preupload", revision:
                return self.preupload(self.repository(f"{owner}/{name}", self.writing(), revision), revision)
            case "POST", "api", "models", owner, name, "commit", revision:
                return self.commit(self.repository(f"{owner}/{name}", self.writing(), revision), revision)
            case "POST", "api", "models", owner, name, "branch", branch:
                repository = self.repository(f"{owner}/{name}", "write")
                repository.refs[branch] = repository.find(json.loads(self.sent)["startingPoint"]).oid
                return Answer({})
            case "POST", owner, name, "info", "lfs", "objects", "batch" if name.endswith(".git"):
                return self.announce(self.repository(f"{owner}/{name[:-4]}", "propose"))
            case "PUT", "storage", owner, name, sha256:
                return self.store(self.server.repositories[f"{owner}/{name}"], sha256)
            case "GET", "storage", owner, name, sha256:
                return Answer(self.server.repositories[f"{owner}/{name}"].objects[sha256])
            case "GET" | "HEAD", owner, name, "resolve", revision, *path:
                return self.resolve(self.repository(f"{owner}/{name}"), revision, "/".join(path))
        raise Refusal(501, "the fake Hub does not know this request")

    # Permissions.

    def writing(self) -> str:
        return "propose" if self.query.get("create_pr") == ["1"] else "write"

    def sign_in(self) -> None:
        if not self.user:
            # huggingface.co sends no code here. The client infers it from the status, but only for https URLs.
            raise Refusal(401, "Invalid username or password.", "RepoNotFound" if "/models/" in self.path else None)

    def repository(self, name: str, purpose: str = "read", ref: str = "") -> Repository:
        """Return a repository if the user has the right to "read" it, to "propose" changes or to "write" to it.

        Authors of a pull request may write to its `ref`.
        """
        repository = self.server.repositories.get(name)
        # The same answer for both, so that users cannot tell that a private repository exists.
        if repository is None or (repository.private and self.user != repository.owner):
            raise Refusal(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if purpose != "read":
            self.sign_in()
        if purpose == "write" and self.user not in (repository.owner, repository.authors.get(ref)):
            raise Refusal(403, f"You have no right to write to {name}")
        return repository

    # Reading.

    def info(self, repository: Repository, revision: str) -> Answer:
        commit = repository.find(revision)
        siblings = [{"rfilename": path} for path in commit.files]
        return Answer({"id": repository.name, "sha": commit.oid, "private": repository.private, "siblings": siblings})

    def refs(self, repository: Repository) -> Answer:
        answer: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "pullRequests": [], "converts": []}
        for ref, oid in repository.refs.items():
            kind = {"refs/tags": "tags", "refs/pr": "pullRequests"}.get(ref.rpartition("/")[0], "branches")
            answer[kind].append({"name": ref.removeprefix("refs/tags/"), "ref": ref, "targetCommit": oid})
        return Answer(answer)

    def tree(self, repository: Repository, revision: str, folder: str) -> Answer:
        """List all files in a folder and below."""
        files = repository.find(revision).files
        inside = [path for path in files if path.startswith(f"{folder}/" if folder else "")]
        if not inside:
            raise Refusal(404, f'{folder} does not exist on "{revision}"', "EntryNotFound")
        fields = ({"type": "file", "path": path, "oid": files[path].oid, "size": files[path].size} for path in inside)
        return Answer(list(fields))

    def resolve(self, repository: Repository, revision: str, path: str) -> Answer:
        commit = repository.find(revision)
        if path not in commit.files:
            raise Refusal(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.oid})
        blob, headers = commit.files[path], {"X-Repo-Commit": commit.oid}
        if not blob.lfs:
            return Answer(blob.content, headers=headers | {"ETag": f'"{blob.etag}"'})
        headers |= {"X-Linked-ETag": f'"{blob.etag}"', "X-Linked-Size": str(blob.size)}
        headers["Location"] = f"{self.server.storage}/{repository.name}/{blob.sha256}"
        return Answer(status=302, headers=headers)

    # Writing.

    def create(self, name: str, organization: str | None = None, **options: str) -> Answer:
        self.sign_in()
        owner, hub = organization or self.user, self.server
        if owner != self.user:
            raise Refusal(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        answer = {"name": f"{owner}/{name}", "url": f"{hub.endpoint}/{owner}/{name}"}
        if answer["name"] in hub.repositories:
            return Answer(answer | {"error": "You already created this model repo"}, 409)
        hub.create(answer["name"], options.get("visibility") == "private")
        return Answer(answer)

    def preupload(self, repository: Repository, revision: str) -> Answer:
        known, answer = repository.find(revision).files, []
        for file in json.loads(self.sent)["files"]:
            path = file["path"]
            mode = "lfs" if path.endswith(LFS_SUFFIXES) and file["size"] else "regular"
            oid = known[path].etag if path in known else None
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return Answer({"files": answer})

    def announce(self, repository: Repository) -> Answer:
        """Return the upload URLs of the LFS objects that the repository does not have yet."""
        objects = json.loads(self.sent)["objects"]
        for entry in objects:
            if entry["oid"] not in repository.objects:
                href = f"{self.server.storage}/{repository.name}/{entry['oid']}"
                entry["actions"] = {"upload": {"href": href}}
        return Answer({"transfer": "basic", "objects": objects})

    def store(self, repository: Repository, sha256: str) -> Answer:
        """Store an LFS object. Knowing its URL is the permission."""
        left = self.server.refuse_uploads_after
        if left == 0:
            raise Refusal(403, "Request has expired")
        if hashlib.sha256(self.sent).hexdigest() != sha256:
            raise Refusal(400, "These are not the bytes that were announced")
        repository.objects[sha256] = self.sent
        self.server.refuse_uploads_after = None if left is None else left - 1
        return Answer()

    def commit(self, repository: Repository, revision: str) -> Answer:
        (_, header), *operations = [json.loads(line).values() for line in self.sent.splitlines()]
        parent, expected, ref = repository.find(revision), header.get("parentCommit", ""), revision
        if self.writing() == "propose":
            parent = repository.find(expected or revision)
            ref = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in repository.refs)}"
        elif ref not in repository.refs:
            raise Refusal(404, f"Not a branch: {ref}", "RevisionNotFound")
        elif expected not in ("", parent.oid):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        changes: dict[str, bytes | None] = {}
        for kind, value in operations:
            path = value["path"]
            if kind == "file":
                changes[path] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                changes[path] = repository.objects[value["oid"]]
            elif path in parent.files:
                changes[path] = None
            else:
                raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        commit = repository.commit(changes, ref, parent)
        repository.authors.setdefault(ref, self.user)
        url = f"{self.server.endpoint}/{repository.name}"
        answer = {"success": True, "commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}"}
        if ref != revision:
            answer["pullRequestUrl"] = f"{url}/discussions/{ref.removeprefix('refs/pr/')}"
        return Answer(answer)
