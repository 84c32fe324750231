"""CONTRIBUTING.md names files and targets that exist."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_named_files_exist() -> None:
    names = re.findall(r"`(?!docs/|tests/docs|build/)([a-z_.]+(?:/[A-Za-z_-]+)+(?:\.[a-z]+)?)`", TEXT)
    assert len(names) > 15
    places = (ROOT, ROOT / "kernels", ROOT / "tests")
    missing = {name for name in names if not any((place / name).exists() for place in places)}
    assert missing == {"evaluation/probes/name.py", "tests/evaluation/probes/test_name.py", "conversion/NAME.py"}


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", TEXT))
    assert named >= {"help", "test", "check", "lint", "types", "docs"}
    assert named <= targets


def test_page_has_no_relative_links() -> None:
    assert re.findall(r"\]\((?!https?://)", TEXT) == []  # relative links would break in the documentation site
