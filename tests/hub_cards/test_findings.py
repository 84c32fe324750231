"""`check`, `card`, `export` and `push` check their arguments before slow imports."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffllama.hub_cards.findings import Finding, FolderError, apply_allowlist, check_arguments


REFUSED = """
import sys
from diffllama.cli import main
for words in (
    ["check", "nowhere"],
    ["card", "nowhere"],
    ["export", "nowhere", "dest"],
    ["push", ".", "me/model", "--create-pr", "--revision", "dev"],
):
    sys.argv = ["diffllama", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code == 1, words
    else:
        raise AssertionError(words)
assert not {"torch", "transformers", "huggingface_hub.hf_api"} & set(sys.modules)
"""


def test_wrong_arguments_are_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", REFUSED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["Error"] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"repo": name}, re.escape(f"must be `owner/name`, got {name!r}"))
          for name in ("model", "a/b/c", "alice/", "al ice/model", "https://huggingface.co/alice/model")),
        *(({"allow": [entry]}, f"`allow` must be FILE:RULE .* got {entry!r}")
          for entry in ("README.md", "README.md:", ":secret", "README.md:anything")),
        ({"create_pr": True, "revision": "dev"}, "use `create_pr` or `revision`"),
    ],
)  # fmt: skip
def test_wrong_argument_is_named(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        check_arguments(tmp_path, **arguments)


def test_missing_folder_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=f"nowhere{os.sep}model is not a folder"):
        check_arguments("nowhere/model")


class TestAllow:
    FINDINGS = (Finding("notes/a.txt", "is not", "unknown-file"), Finding("notes/a.txt", "contains", "secret"))

    def test_allowed_error_is_a_note(self) -> None:
        unknown, secret = apply_allowlist(self.FINDINGS, ["notes/*:unknown-file"])
        assert (unknown.severity, str(unknown)) == ("note", "notes/a.txt:unknown-file: is not (allowed)")
        assert secret == self.FINDINGS[1]
        assert apply_allowlist([unknown], ["notes/a.txt:unknown-file"]) == [unknown]
        (named,) = apply_allowlist([Finding("a[1].txt", "is not", "unknown-file")], ["a[1].txt:unknown-file"])
        assert named.severity == "note"

    @pytest.mark.parametrize("entry", ["figure.svg:unknown-file", "notes/a.txt:size", "*:program"])
    def test_entry_without_a_match_is_an_error(self, entry: str) -> None:
        with pytest.raises(FolderError, match=re.escape(f"{entry!r}, which matches no finding")):
            apply_allowlist(self.FINDINGS, [entry])
