# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Sending folders to the Hub."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelInfo,
    RepoFile,
    get_token,
)
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from diffllama import __version__
from diffllama.conversion.weight_map import lines
from diffllama.hub_cards.cards import (
    is_as_written,
    pinned_revision,
    repinned,
    updated_card,
    written_by_hand,
)
from diffllama.hub_cards.checks import Finding, FolderError, check, check_code, sent_files
from diffllama.hub_cards.code import hub_code
from diffllama.hub_cards.hub_folder import folder_facts
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Shipment:
    """What is about to be sent.

    Attributes:
        repo: the repository, `owner/name`.
        revision: the branch; `None` is the main one.
        new: whether the repository does not exist yet.
        private: whether it is, or will be, private.
        files: path in the repository -> bytes.
        removed: weights in the repository that the folder no longer has; they are removed.
        findings: what is good to know about the folder.
    """

    repo: str
    revision: str | None
    new: bool
    private: bool
    files: dict[str, int]
    removed: list[str]
    findings: list[Finding]


def push(
    folder: str | os.PathLike[str],
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    code_only: bool = False,
    create_pr: bool = False,
    show: Callable[[Shipment], None] | None = None,
) -> CommitInfo:
    """Sends a folder with a model of ours to the Hub, after `check` found nothing wrong with it.

    Large files that have arrived are not sent again, so a push that broke off goes on when it is repeated. The files
    are one commit; a second one pins the card's code to the first. A card that was edited on the Hub keeps its text.

    Args:
        folder: the folder.
        repo: the repository, `owner/name`. It is made if it does not exist.
        private: whether it is made private.
        revision: a branch, which is made if it does not exist. The main one by default.
        code_only: whether only the code goes to a repository that exists; `folder` need not have more than that.
        create_pr: whether it becomes a pull request.
        show: called with what is about to be sent.

    Returns:
        What the Hub says of the last commit, or of the pull request.

    Raises:
        FolderError: something is wrong with the folder; all of it is listed.
        ValueError: the names cannot be those of a repository and a branch; or the repository is public and should be
            private, does not exist and should, or is no model's of ours; or its card was edited both there and in the
            folder.
        PermissionError: there is no token.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses.
    """
    folder = Path(os.path.abspath(folder))
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ValueError(f"The repository must be `owner/name`, got {repo!r}.")
    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        raise ValueError(f"`revision` must be a branch, and {revision} is a commit, which nothing can be added to.")
    findings = list(check_code(folder)) if code_only else check(folder)
    if wrong := [str(finding) for finding in findings if finding.wrong]:
        raise FolderError(lines(f"{folder} is not sent", wrong))
    if get_token() is None:
        raise PermissionError("There is no token for the Hub. Run `hf auth login`, or set HF_TOKEN.")
    api = HfApi(library_name="diffllama", library_version=__version__)
    there = find(api, repo, revision)
    if there is None and code_only:
        raise ValueError(f"There is no model {repo} that this token may read, and code alone is no model.")
    if there is not None and private and not there.private:
        raise ValueError(
            f"{repo} exists and is public. Make it private in its settings on the Hub, or leave --private."
        )
    names = {sibling.rfilename for sibling in (there and there.siblings) or ()}

    if code_only:
        sent: dict[str, Path | bytes] = {name: folder / name for name in hub_code(folder)}
        sent |= settled_config(api, repo, revision)
        removed = []
    else:
        files = {file.relative_to(folder).as_posix(): file for file in sent_files(folder)}
        sent = {name: file for name, file in files.items() if name != "README.md"}
        removed = sorted(name for name in names - files.keys() if _WEIGHTS.fullmatch(name))
    on_hub = read_remote(api, repo, "README.md", revision) if "README.md" in names else ""
    if not code_only:
        here = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").is_file() else ""
        card, metadata = settled_card(here, on_hub, repo)  # refuses before anything is sent

    if show is not None:
        sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in sent.items()}
        hidden = there.private if there is not None else private
        show(Shipment(repo, revision, there is None, bool(hidden), sizes, removed, findings))
    if there is None:
        api.create_repo(repo, private=private)
    if revision is not None and not create_pr and not revision.startswith("refs/"):
        api.create_branch(repo, branch=revision, exist_ok=True)
    operations: list[CommitOperationAdd | CommitOperationDelete]
    operations = [CommitOperationAdd(name, file) for name, file in sent.items()]
    operations += [CommitOperationDelete(name) for name in removed]
    what = "code" if code_only else "model"
    message = f"Upload {what} with diffllama {__version__}"
    commit = api.create_commit(repo, operations, commit_message=message, revision=revision, create_pr=create_pr)

    pin, pinned = commit.oid, pinned_revision(on_hub)
    if pinned is not None and files_at(api, repo, pinned) == files_at(api, repo, pin):
        pin = pinned  # nothing was new
    if code_only:
        text = repinned(on_hub, pin)
    else:
        text, _ = updated_card(card, folder_facts(folder), repo.partition("/")[2], metadata, repo, pin)
    if text == on_hub:
        return commit
    return api.create_commit(
        repo,
        [CommitOperationAdd("README.md", text.encode())],
        commit_message=f"Pin the card's code to {pin[:8]}",
        revision=commit.pr_revision or revision,
        create_pr=create_pr and commit.pr_revision is None,
    )


def find(api: HfApi, repo: str, revision: str | None) -> ModelInfo | None:
    """What the Hub has in a repository's branch, or in its main one if there is no such branch; `None` if nothing."""
    try:
        try:
            return api.model_info(repo, revision=revision)
        except RevisionNotFoundError:
            return api.model_info(repo)
    except RepositoryNotFoundError:
        return None


def files_at(api: HfApi, repo: str, revision: str) -> dict[str, str]:
    """Path -> hash of the files of a commit, but for its card. Empty if there is no such commit."""
    try:
        entries = list(api.list_repo_tree(repo, recursive=True, revision=revision))
    except RevisionNotFoundError:
        return {}
    return {entry.path: entry.blob_id for entry in entries if isinstance(entry, RepoFile) and entry.path != "README.md"}


def read_remote(api: HfApi, repo: str, name: str, revision: str | None) -> str:
    """The text of a file in a repository."""
    try:
        path = api.hf_hub_download(repo, name, revision=revision)
    except RevisionNotFoundError:  # a branch that is to be made
        path = api.hf_hub_download(repo, name)
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


def settled_config(api: HfApi, repo: str, revision: str | None) -> dict[str, bytes]:
    """The configuration of a model on the Hub with this package's `auto_map`, if it has another one.

    Raises:
        ValueError: it is no model of ours.
    """
    try:
        config = json.loads(read_remote(api, repo, "config.json", revision))
    except EntryNotFoundError:
        config = {}
    if config.get("model_type") != DiffLlamaConfig.model_type:
        raise ValueError(
            f"{repo} has no model of ours: `model_type` must be {DiffLlamaConfig.model_type!r}, got "
            f"{config.get('model_type')!r}."
        )
    if config.get("auto_map") == AUTO_MAP:
        return {}
    return {"config.json": (json.dumps(config | {"auto_map": AUTO_MAP}, indent=2) + "\n").encode()}


def settled_card(here: str, on_hub: str, repo: str) -> tuple[str, dict[str, Any]]:
    """Which of two cards is to be updated, the folder's or the Hub's, and the metadata of both.

    Raises:
        ValueError: people have written into both, in different ways.
    """
    known_here, known_there = (ModelCard(text).data.to_dict() if text.strip() else {} for text in (here, on_hub))
    if is_as_written(on_hub):
        metadata = known_there | known_here
    else:  # edited on the Hub, or the first
        metadata = known_here | known_there
        mine, theirs = written_by_hand(here), written_by_hand(on_hub)
        if mine and not set(theirs.splitlines()) <= set(mine.splitlines()):
            raise ValueError(
                f"README.md was edited both in the folder and in {repo}. Copy what was written there into the folder's "
                f"(`hf download {repo} README.md` gets it)."
            )
    return (here if written_by_hand(here) or not on_hub else on_hub), metadata
