# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The findings of `check`, their rules, and which of them the user allows."""

import os
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeVar, get_args

from diffllama.checkpoints.errors import DiffLlamaError


Rule = Literal[
    "adapter", "archive", "auto-map", "card", "code", "code-differs", "config", "config-field", "content",
    "generation", "hidden-file", "json", "licence", "limits", "link", "non-finite", "other-code", "path", "pickle",
    "program", "secret", "size", "special-file", "template", "tokenizer", "unknown-file", "weights",
]  # fmt: skip
"""Rules of findings."""


class FolderError(DiffLlamaError):
    """A folder must not be published. The message lists every error, one per line."""


@dataclass(frozen=True)
class Finding:
    """Something about a folder.

    Attributes:
        file: path of the file within the folder.
        message: a description.
        rule: the rule that the file breaks. `allow` takes FILE:RULE.
        severity: "error" if the folder must not be published as it is; "note" for information.
    """

    file: str
    message: str
    rule: Rule
    severity: Literal["error", "note"] = "error"

    def __str__(self) -> str:
        return f"{self.file}:{self.rule}: {self.message}"


T = TypeVar("T")
Check = Generator[Finding | str, None, T]
"""Generator of findings, and of the name of each file before it is read. Returns the loaded object, if any."""


def note(file: str, message: str, rule: Rule) -> Finding:
    """Return a finding for information."""
    return Finding(file, message, rule, "note")


def error_lines(findings: Iterable[Finding]) -> list[str]:
    """Return the text of each error among the findings."""
    return [str(finding) for finding in findings if finding.severity == "error"]


def check_arguments(
    folder: str | os.PathLike[str],
    allow: Sequence[str] = (),
    repo: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> None:
    """Raise `ValueError` or `FileNotFoundError` for invalid arguments of `check`, `export` and `push`.

    It imports nothing slow: call it before imports that take seconds.
    """
    if repo is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ValueError(f"The repository must be `owner/name`, got {repo!r}.")
    if create_pr and revision is not None:
        raise ValueError(f"A pull request goes to the main branch: use `create_pr` or `revision` ({revision!r}).")
    for entry in allow:
        file, _, rule = entry.rpartition(":")
        if not file or rule not in get_args(Rule):
            rules = ", ".join(get_args(Rule))
            raise ValueError(f"`allow` must be FILE:RULE as printed by `check`, got {entry!r}. Rules: {rules}")
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} is not a folder. Name a folder with a model.")


def apply_allowlist(findings: Iterable[Finding], allow: Sequence[str]) -> list[Finding]:
    """Downgrade allowed errors to notes. Raises `FolderError` for an entry of `allow` that matches no finding."""
    result = list(findings)
    for entry in allow:
        pattern, _, rule = entry.rpartition(":")
        matches = {
            i
            for i, finding in enumerate(result)
            if finding.rule == rule and (finding.file == pattern or fnmatchcase(finding.file, pattern))
        }
        if not matches:
            listed = "".join(f"\n  {finding}" for finding in result) or " none"
            raise FolderError(f"`allow` has {entry!r}, which matches no finding. Findings:{listed}")
        for i in matches:
            if result[i].severity == "error":
                result[i] = replace(result[i], message=f"{result[i].message} (allowed)", severity="note")
    return result
