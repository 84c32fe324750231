# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the commit into built packages. Everything else is in pyproject.toml."""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


NOTE = "_commit.txt"


def write_commit(folder: Path) -> None:
    """Write the commit of this clone into a folder. An unpacked source distribution contains the file already."""
    try:
        git = ["git", "-C", str(Path(__file__).parent)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain", "modeling_diff"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return
    if (Path(__file__).parent / ".git").exists():  # git may have found an enclosing clone of something else
        (folder / NOTE).write_text(head + (" with changes" if changes.stdout else "") + "\n", encoding="utf-8")


class Build(build_py):
    """Builds the packages."""

    def run(self) -> None:
        """Build the packages and write the commit into them."""
        super().run()
        if not self.editable_mode:  # an editable install asks git
            write_commit(Path(self.build_lib, "diffllama"))


class SourceDistribution(sdist):
    """Makes a source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files and write the commit."""
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir, "src", "diffllama"))


setup(cmdclass={"build_py": Build, "sdist": SourceDistribution})
