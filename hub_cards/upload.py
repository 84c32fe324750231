# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Sending folders to the Hub."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    RepoFile,
    get_token,
)
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from diffllama.checkpoints.errors import lines
from diffllama.checkpoints.files import COMPANIONS, NAMES
from diffllama.checkpoints.json_files import as_json
from diffllama.checkpoints.versions import VERSION
from diffllama.hub_cards.cards import (
    CARD,
    card_metadata,
    pinned_revision,
    read_card,
    repinned,
    settled_card,
    updated_card,
)
from diffllama.hub_cards.checks import check, check_code
from diffllama.hub_cards.code import hub_code
from diffllama.hub_cards.findings import Finding, FolderError, check_arguments, errors
from diffllama.hub_cards.hub_folder import folder_facts
from diffllama.hub_cards.model_files import sent_files
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


_STEM = NAMES[0].removesuffix(".safetensors")
REPLACED = (
    f"{_STEM}.safetensors*",
    f"{_STEM}-*.safetensors",
    *(name for name in COMPANIONS if not name.startswith(("LICEN", "NOTICE"))),
)
"""Files of a model on the Hub that are removed if the folder has none of that name: what transformers would load."""


@dataclass(frozen=True)
class Shipment:
    """What is about to be sent.

    Attributes:
        repo: the repository, `owner/name`.
        revision: the branch or pull request; `None` is the main branch.
        new: whether the repository does not exist yet.
        private: whether it is, or will be, private.
        files: path in the repository -> bytes.
        removed: files in the repository that the folder no longer has; they are removed, see `REPLACED`.
        findings: what is good to know about the folder.
    """

    repo: str
    revision: str | None
    new: bool
    private: bool
    files: dict[str, int]
    removed: list[str]
    findings: list[Finding]


@dataclass(frozen=True)
class Arrival:
    """What arrived.

    Attributes:
        url: of the commit or the pull request.
        commit: the commit with the files, to which the card is pinned.
        changed: whether anything was new.
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
    show: Callable[[Shipment], None] | None = None,
) -> Arrival:
    """Sends a folder with a model of ours to the Hub, after `check` found nothing wrong with it.

    Large files that have arrived are not sent again, so a push that broke off goes on when it is repeated. The files
    are one commit; a second one pins the card's code to the first. What people wrote into the card on the Hub stays.

    Args:
        folder: the folder.
        repo: the repository, `owner/name`. It is made if it does not exist.
        private: whether it is made private.
        revision: a branch, which is made if it does not exist, or `refs/pr/N`. The main branch by default.
        code_only: whether only the code goes to a model that exists; `folder` need not have more than that.
        create_pr: whether it becomes a pull request to the main branch.
        replace_card: whether the folder's card replaces the one on the Hub.
        allow: see `check`.
        show: called with what is about to be sent.

    Raises:
        FolderError: something is wrong with the folder; all of it is listed.
        ValueError: options do not go together or name what cannot be pushed to; the repository is public and should be
            private, does not exist and should, or has another model; or people wrote different things into both cards.
        PermissionError: there is no token.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses, also because somebody else has pushed meanwhile.
    """
    check_arguments(folder, allow, repo, revision, create_pr)
    folder = Path(os.path.abspath(folder))
    findings = check_code(folder, allow=allow) if code_only else check(folder, allow=allow)
    if wrong := errors(findings):
        raise FolderError(lines(f"{folder} is not sent", wrong))
    if get_token() is None:
        raise PermissionError("There is no token for the Hub. Run `hf auth login`, or set HF_TOKEN.")
    remote = Remote(HfApi(library_name="diffllama", library_version=VERSION), repo, revision)
    if private and remote.exists and not remote.private:
        raise ValueError(f"{repo} is public. Make it private in its settings on the Hub, or leave out `private`.")
    model = remote.config()
    if code_only and not model:
        raise ValueError(f"{repo} has no model, or this token may not read it, and code alone is none.")
    if model and model.get("model_type") != DiffLlamaConfig.model_type:
        raise ValueError(f"{repo} has another model, of type {model.get('model_type')!r}. Name another repository.")

    sent: dict[str, Path | bytes]
    removed: list[str] = []
    if code_only:
        sent = {name: folder / name for name in hub_code(folder)}
        config = model | {"auto_map": AUTO_MAP}
        if config != model:
            sent["config.json"] = as_json(config).encode()
    else:
        files = {file.relative_to(folder).as_posix(): file for file in sent_files(folder)}
        sent = {name: file for name, file in files.items() if name != CARD}
        removed = [name for name in remote.files if name not in files and any(fnmatch(name, p) for p in REPLACED)]
    on_hub = remote.card()
    if not code_only:
        here = read_card(folder / CARD)
        card, metadata = (
            (here, {})
            if replace_card
            else settled_card(
                here,
                on_hub,
                "the folder",
                repo,
                f"push with --replace-card (`hf download {repo} {CARD}` gets the other)",
            )
        )
        facts = folder_facts(folder)

    if show is not None:
        sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in sent.items()}
        show(Shipment(repo, revision, not remote.exists, remote.private or private, sizes, removed, findings))
    remote.make(private)
    files_commit = remote.commit(
        [*(CommitOperationAdd(name, file) for name, file in sent.items()), *map(CommitOperationDelete, removed)],
        f"Upload {'code' if code_only else 'model'} with diffllama {VERSION}",
        create_pr,
    )
    pin, pinned = files_commit.oid, pinned_revision(on_hub)
    if pinned is not None and remote.files_at(pinned) == remote.files_at(pin):
        pin = pinned  # nothing was new
    if code_only:
        text = repinned(on_hub, pin)
    else:
        text, _ = updated_card(card, facts, repo.partition("/")[2], metadata, repo, pin, where=str(folder / CARD))
    last = files_commit
    if text != on_hub:
        opens = create_pr and files_commit.pr_url is None
        last = remote.commit([CommitOperationAdd(CARD, text.encode())], f"Pin the card's code to {pin[:8]}", opens)
    return Arrival(files_commit.pr_url or last.pr_url or last.commit_url, pin, last.oid != remote.found)


class Remote:
    """A repository on the Hub, or the place for one, as it was when it was looked at.

    Attributes:
        exists: whether there is such a repository.
        private: whether it is private.
        files: the files of the branch, or of the main one if it is to be made.
        found, head: the commits that the branch was at, and is at.

    Raises:
        ValueError: `revision` is nothing that can be pushed to.
    """

    def __init__(self, api: HfApi, repo: str, revision: str | None) -> None:
        self.api, self.repo, self.revision = api, repo, revision
        self.exists, self.private, self.branch_exists = True, False, True
        self.files: list[str] = []
        self.found: str | None = None
        self.head: str | None = None
        try:
            refs = api.list_repo_refs(repo, include_pull_requests=True)
        except RepositoryNotFoundError:
            self.exists = False
            if revision is not None and revision.startswith("refs/"):
                raise
        if revision is not None and (not revision or re.fullmatch("[0-9a-f]{7,40}", revision)):
            raise ValueError(f"`revision` must be a branch; nothing can be added to a commit, got {revision!r}.")
        if not self.exists:
            self.branch_exists = revision in (None, "main")
            return
        if revision is not None:
            names = {ref.name for ref in refs.branches} | {ref.ref for ref in refs.pull_requests or ()}
            self.branch_exists = revision in names
            if revision in {ref.name for ref in refs.tags}:
                raise ValueError(f"`revision` must be a branch, and {revision!r} is a tag of {repo}.")
            if revision.startswith("refs/") and not self.branch_exists:
                raise ValueError(f"`revision`: {repo} has no {revision}.")
        info = api.model_info(repo, revision=revision if self.branch_exists else None)
        self.private, self.found = bool(info.private), info.sha
        self.head = self.found
        self.files = sorted(sibling.rfilename for sibling in info.siblings or ())

    def read(self, name: str) -> str:
        """The text of a file; empty if there is none."""
        if name not in self.files:
            return ""
        return Path(self.api.hf_hub_download(self.repo, name, revision=self.found)).read_text(encoding="utf-8-sig")

    def config(self) -> dict[str, Any]:
        """The configuration of its model; empty if there is none."""
        try:
            content = json.loads(self.read("config.json") or "{}")
        except ValueError as error:
            raise ValueError(f"config.json of {self.repo} is no JSON: {error}") from error
        return content if isinstance(content, dict) else {"model_type": None}

    def card(self) -> str:
        """The text of its card; empty if there is none."""
        text = self.read(CARD)
        card_metadata(text, f"{CARD} of {self.repo}")  # refuses if it cannot be read
        return text

    def make(self, private: bool) -> None:
        """Makes repository and branch, if they do not exist."""
        if not self.exists:
            self.api.create_repo(self.repo, private=private)
            self.found = self.head = self.api.model_info(self.repo).sha
        if not self.branch_exists:
            self.api.create_branch(self.repo, branch=str(self.revision), revision=self.found)

    def commit(
        self, operations: list[CommitOperationAdd | CommitOperationDelete], message: str, create_pr: bool
    ) -> CommitInfo:
        """Adds a commit to what the branch was at; the Hub refuses if somebody else has added one since."""
        done = self.api.create_commit(
            self.repo,
            operations,
            commit_message=message,
            revision=self.revision,
            create_pr=create_pr,
            parent_commit=self.head,
        )
        self.revision, self.head = done.pr_revision or self.revision, done.oid
        return done

    def files_at(self, commit: str) -> dict[str, str]:
        """Path -> hash of the files of a commit, but for its card. Empty if there is no such commit."""
        try:
            entries = list(self.api.list_repo_tree(self.repo, recursive=True, revision=commit))
        except RevisionNotFoundError:
            return {}
        return {entry.path: entry.blob_id for entry in entries if isinstance(entry, RepoFile) and entry.path != CARD}
