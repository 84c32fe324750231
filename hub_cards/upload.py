# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Uploads of folders to the Hub."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from diffllama.checkpoints.errors import lines
from diffllama.checkpoints.files import AUXILIARY_FILES, NAMES
from diffllama.checkpoints.json_files import as_json
from diffllama.checkpoints.versions import VERSION
from diffllama.hub_cards.cards import CARD, merge_cards, pin_revision, pinned_revision, read_card, updated_card
from diffllama.hub_cards.checks import check
from diffllama.hub_cards.code import folder_code
from diffllama.hub_cards.file_checks import uploaded_files
from diffllama.hub_cards.findings import Finding, FolderError, check_arguments, error_lines
from diffllama.hub_cards.hub_folder import folder_facts
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


_STEM = NAMES[0].removesuffix(".safetensors")
REPLACED = (
    f"{_STEM}.safetensors*",
    f"{_STEM}-*.safetensors",
    *(name for name in AUXILIARY_FILES if not name.startswith(("LICEN", "NOTICE"))),
)
"""Files that transformers loads. Those that the folder lacks are deleted on the Hub."""


@dataclass(frozen=True)
class UploadPlan:
    """Plan of an upload.

    Attributes:
        repo: the repository, `owner/name`.
        revision: the branch or pull request; `None` is the main branch.
        creates_repo: whether the repository does not exist yet.
        private: whether the repository is, or will be, private.
        files: path in the repository -> bytes.
        deleted: files of the repository that the folder lacks and that are deleted, see `REPLACED`.
        findings: the notes about the folder.
    """

    repo: str
    revision: str | None
    creates_repo: bool
    private: bool
    files: dict[str, int]
    deleted: list[str]
    findings: list[Finding]


@dataclass(frozen=True)
class UploadResult:
    """Result of an upload.

    Attributes:
        url: URL of the commit or the pull request.
        commit: the commit with the files, to which the card's code is pinned.
        changed: whether anything was committed.
    """

    url: str
    commit: str
    changed: bool


def push(
    folder: str | os.PathLike[str],
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    code_only: bool = False,
    create_pr: bool = False,
    replace_card: bool = False,
    allow: Sequence[str] = (),
    show: Callable[[UploadPlan], None] | None = None,
) -> UploadResult:
    """Upload a folder with a diffllama model to the Hub, if `check` finds no errors in it.

    Large files that were uploaded before are not uploaded again, so that repeating an interrupted push resumes it. The
    files are one commit; a second one pins the card's code to the first. What people wrote into the card on the Hub
    stays.

    Args:
        folder: the folder.
        repo: the repository, `owner/name`. It is created if it does not exist.
        private: whether to create it as a private one.
        revision: a branch, which is created if it does not exist, or `refs/pr/N`. The main branch by default.
        code_only: whether to update only the code of a model on the Hub. `folder` need not have anything else.
        create_pr: whether to open a pull request to the main branch.
        replace_card: whether the folder's card replaces the one on the Hub.
        allow: see `check`.
        show: called with the plan before anything is uploaded.

    Raises:
        FolderError: the folder has errors; all are listed.
        ValueError: arguments contradict each other; `revision` is not a branch; the repository is public despite
            `private`, has no model despite `code_only`, or has another model; or the handwritten texts of both cards
            differ.
        PermissionError: there is no token.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses, for example because somebody else has pushed meanwhile.
    """
    check_arguments(folder, allow, repo, revision, create_pr)
    folder = Path(os.path.abspath(folder))
    findings = check(folder, allow=allow, code_only=code_only)
    if errors := error_lines(findings):
        raise FolderError(lines(f"{folder} is not uploaded", errors))
    if get_token() is None:
        raise PermissionError("There is no token for the Hub. Run `hf auth login`, or set HF_TOKEN.")
    remote = Remote(HfApi(library_name="diffllama", library_version=VERSION), repo, revision)
    if private and remote.exists and not remote.private:
        raise ValueError(f"{repo} is public. Make it private in its settings on the Hub, or leave out `private`.")
    model = remote.config()
    if code_only and not model:
        raise ValueError(f"{repo} has no model whose code could be updated, or this token cannot read it.")
    if model and model.get("model_type") != DiffLlamaConfig.model_type:
        raise ValueError(f"{repo} has another model, of type {model.get('model_type')!r}. Name another repository.")

    uploads: dict[str, Path | bytes]
    deleted: list[str] = []
    old_card = remote.read(CARD)
    metadata: dict[str, Any] = {}
    if code_only:
        uploads = {name: folder / name for name in folder_code(folder)[0]}
        config = model | {"auto_map": AUTO_MAP}
        if config != model:
            uploads["config.json"] = as_json(config).encode()
    else:
        files = {file.relative_to(folder).as_posix(): file for file in uploaded_files(folder)}
        uploads = {name: file for name, file in files.items() if name != CARD}
        deleted = [name for name in remote.files if name not in files and any(fnmatch(name, p) for p in REPLACED)]
        card = read_card(folder / CARD)
        if not replace_card:
            alternative = f"push with --replace-card (`hf download {repo} {CARD}` gets the other)"
            card, metadata = merge_cards(card, old_card, "the folder", repo, alternative)
        facts = folder_facts(folder)

    if show is not None:
        sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in uploads.items()}
        show(UploadPlan(repo, revision, not remote.exists, remote.private or private, sizes, deleted, findings))
    remote.create(private)
    files_commit = remote.commit(
        [*(CommitOperationAdd(name, file) for name, file in uploads.items()), *map(CommitOperationDelete, deleted)],
        f"Upload {'code' if code_only else 'model'} with diffllama {VERSION}",
        create_pr,
    )
    pin, old_pin = files_commit.oid, pinned_revision(old_card)
    if old_pin is not None and remote.files_at(old_pin) == remote.files_at(pin):
        pin = old_pin  # no file has changed
    if code_only:
        new_card = pin_revision(old_card, pin)
    else:
        new_card, _ = updated_card(card, facts, repo.partition("/")[2], metadata, repo, pin, where=str(folder / CARD))
    last_commit = files_commit
    if new_card != old_card:
        operations = [CommitOperationAdd(CARD, new_card.encode())]
        opens_pr = create_pr and files_commit.pr_url is None
        last_commit = remote.commit(operations, f"Pin the card's code to {pin[:8]}", opens_pr)
    url = files_commit.pr_url or last_commit.pr_url or last_commit.commit_url
    return UploadResult(url, pin, last_commit.oid != remote.start)


class Remote:
    """Snapshot of a repository on the Hub, which may not exist yet.

    Attributes:
        exists: whether the repository exists.
        private: whether it is private.
        files: the files of the branch, or of the main one if the branch does not exist.
        start, head: the first and the current commit of the branch.

    Raises:
        ValueError: `revision` is not a branch or pull request.
    """

    def __init__(self, api: HfApi, repo: str, revision: str | None) -> None:
        self.api, self.repo, self.revision = api, repo, revision
        self.exists, self.private, self.branch_exists = True, False, revision in (None, "main")
        self.files: list[str] = []
        self.start: str | None = None
        if revision is not None and (not revision or re.fullmatch("[0-9a-f]{7,40}", revision)):
            raise ValueError(f"`revision` must be a branch, got the commit {revision!r}.")
        try:
            refs = api.list_repo_refs(repo, include_pull_requests=True)
        except RepositoryNotFoundError:
            if revision is not None and revision.startswith("refs/"):
                raise
            self.exists = False
            return
        if revision is not None:
            if revision in {ref.name for ref in refs.tags}:
                raise ValueError(f"`revision` must be a branch, but {revision!r} is a tag of {repo}.")
            names = {ref.name for ref in refs.branches} | {ref.ref for ref in refs.pull_requests or ()}
            self.branch_exists = revision in names
            if revision.startswith("refs/") and not self.branch_exists:
                raise ValueError(f"`revision`: {repo} has no {revision}.")
        info = api.model_info(repo, revision=revision if self.branch_exists else None)
        self.private = bool(info.private)
        self.start = self.head = info.sha
        self.files = sorted(sibling.rfilename for sibling in info.siblings or ())

    def read(self, name: str) -> str:
        """Return the text of a file, "" if it does not exist."""
        if name not in self.files:
            return ""
        return Path(self.api.hf_hub_download(self.repo, name, revision=self.start)).read_text(encoding="utf-8-sig")

    def config(self) -> dict[str, Any]:
        """Return the configuration of the model, {} if it does not exist."""
        try:
            content = json.loads(self.read("config.json") or "{}")
        except ValueError as error:
            raise ValueError(f"config.json of {self.repo} is not valid JSON: {error}") from error
        return content if isinstance(content, dict) else {"model_type": None}

    def create(self, private: bool) -> None:
        """Create repository and branch, if they do not exist."""
        if not self.exists:
            self.api.create_repo(self.repo, private=private)
            self.start = self.head = self.api.model_info(self.repo).sha
        if not self.branch_exists:
            self.api.create_branch(self.repo, branch=str(self.revision), revision=self.start)

    def commit(
        self, operations: Sequence[CommitOperationAdd | CommitOperationDelete], message: str, create_pr: bool
    ) -> CommitInfo:
        """Add a commit to `head`. The Hub refuses if somebody else has added one since."""
        commit = self.api.create_commit(
            self.repo,
            operations,
            commit_message=message,
            revision=self.revision,
            create_pr=create_pr,
            parent_commit=self.head,
        )
        self.revision, self.head = commit.pr_revision or self.revision, commit.oid
        return commit

    def files_at(self, commit: str) -> dict[str, str]:
        """Return the files of a commit without its card: path -> hash. Empty if the commit does not exist."""
        try:
            entries = list(self.api.list_repo_tree(self.repo, recursive=True, revision=commit))
        except RevisionNotFoundError:
            return {}
        return {entry.path: entry.blob_id for entry in entries if isinstance(entry, RepoFile) and entry.path != CARD}
