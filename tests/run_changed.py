# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the quick tests of files that differ from a branch, including uncommitted changes.

Usage: python tests/run_changed.py [BRANCH] [PYTEST OPTIONS ...]

A file's tests are in the file that mirrors it: conversion/shards.py in tests/conversion/test_shards.py, README.md in
tests/test_readme.py. A changed helper of many tests needs a run of all tests.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


ROOT = Path(__file__).parents[1]
FOLDERS = {"src/diffllama": "package", "kernels/torch-ext/diff_attention": "kernels"}
"""Folder -> that of its tests, where the names differ."""

TESTS = {path.relative_to(ROOT) for path in ROOT.glob("tests/**/test_*.py")}


def changed_files(branch: str) -> list[Path]:
    """Return the files that differ from the branch's merge base, and untracked files."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()

    (base,) = git("merge-base", branch, "HEAD")
    return [Path(name) for name in git("diff", "--name-only", base) + git("ls-files", "-o", "--exclude-standard")]


def tests_of(changed: Iterable[Path]) -> set[Path]:
    """Return the changed test files, and those that mirror changed files."""
    tests: set[Path] = set()
    for path in changed:
        folder = Path(FOLDERS.get(path.parent.as_posix(), path.parent))
        name = path.parent.name if path.stem == "__init__" else path.stem.strip("_").lower()
        tests |= {path, "tests" / folder / f"test_{name}.py"} & TESTS
    return tests


if __name__ == "__main__":
    branch, *options = sys.argv[1:] or ["main"]
    if tests := sorted(map(str, tests_of(changed_files(branch)))):
        command = [sys.executable, "-m", "pytest", "-m", "not slow", *options, *tests]
        print(" ".join(command[1:]), flush=True)
        sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    print(f"No test file belongs to what changed since {branch}.")
