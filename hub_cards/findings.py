# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What `check` finds in a folder, and what the user allows."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from diffllama.checkpoints.errors import DiffLlamaError


RULES = {
    "adapter": "a PEFT adapter beside the model, which makes transformers load the model that the adapter names",
    "archive": "a compressed file or an archive",
    "auto-map": "`auto_map` names code other than this package's",
    "card": "README.md and its metadata",
    "code": "code that transformers cannot load from the Hub",
    "code-differs": "code that is not this package's",
    "config": "config.json does not load",
    "config-field": "a field of config.json that makes transformers load or run something else",
    "content": "a file's content is not what its name says",
    "generation": "generation_config.json",
    "hidden-file": "a hidden file, which `push` does not send",
    "json": "a JSON file that cannot be read",
    "licence": "no licence",
    "limits": "reading the file takes too much time or memory, or ends the process",
    "link": "a link to a folder, to nothing or out of the folder",
    "non-finite": "NaN or infinite weights",
    "other-code": "a Python file that is not part of the model",
    "path": "a path on somebody's machine",
    "pickle": "a pickle, which runs code when it is loaded",
    "program": "a program or a script",
    "secret": "a token, key or password",
    "size": "a file of text that is too large to be searched",
    "special-file": "a pipe, socket or device",
    "template": "a chat template that fails or reaches for Python's internals",
    "tokenizer": "the tokenizer does not load or does not fit the model",
    "unknown-file": "a file that is not part of a model folder",
    "weights": "weights are missing, damaged or not those that config.json asks for",
}
"""Rule -> what it is about."""


class FolderError(DiffLlamaError):
    """A folder is not fit for the Hub. The message lists what is wrong with it, a line each."""


@dataclass(frozen=True)
class Finding:
    """Something about a folder.

    Attributes:
        file: the file that it is about.
        message: what it is.
        rule: one of `RULES`. FILE:RULE is what `allow` takes.
        severity: "error" if the folder must not be published so; "note" if it is good to know.
    """

    file: str
    message: str
    rule: str
    severity: Literal["error", "note"] = "error"

    def __str__(self) -> str:
        return f"{self.file}:{self.rule}: {self.message}"


def note(file: str, message: str, rule: str) -> Finding:
    """A finding that is good to know."""
    return Finding(file, message, rule, "note")


def errors(findings: Iterable[Finding]) -> list[str]:
    """The findings with which a folder must not be published, as text."""
    return [str(finding) for finding in findings if finding.severity == "error"]


def check_arguments(
    folder: str | os.PathLike[str],
    allow: Sequence[str] = (),
    repo: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> None:
    """Checks what needs no library: called before anything that takes seconds to import.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: an argument of `check`, `export` or `push` is wrong; the message says which.
    """
    if repo is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ValueError(f"The repository must be `owner/name`, got {repo!r}.")
    if create_pr and revision is not None:
        raise ValueError(f"A pull request goes to the main branch: leave out `create_pr` or `revision` ({revision!r}).")
    for entry in allow:
        file, _, rule = entry.rpartition(":")
        if not file or rule not in RULES:
            raise ValueError(
                f"`allow` must be FILE:RULE as `check` prints them, got {entry!r}. Rules: {', '.join(RULES)}"
            )
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} is no folder. Name a folder with a model.")


def allowed(findings: Iterable[Finding], allow: Sequence[str]) -> list[Finding]:
    """Findings, of which those that the user allows are notes.

    Args:
        findings: what `check` finds.
        allow: FILE:RULE each, where FILE is a name or a pattern such as `notes/*`.

    Raises:
        ValueError: an entry of `allow` matches no finding.
    """
    result = list(findings)
    for entry in allow:
        file, _, rule = entry.rpartition(":")
        matching = [
            i
            for i, finding in enumerate(result)
            if finding.rule == rule and (finding.file == file or fnmatchcase(finding.file, file))
        ]
        if not matching:
            listed = "".join(f"\n  {finding}" for finding in result) or " nothing"
            raise FolderError(f"`allow` has {entry!r}, which matches nothing that was found. Found:{listed}")
        for i in matching:
            if result[i].severity == "error":
                result[i] = replace(result[i], message=f"{result[i].message} (allowed)", severity="note")
    return result
