# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the kernels as a repository of the Hub's type `kernel`; Python 3.11.

    python kernels/write_repository.py DEST

DEST gets the sources (build.toml, torch-ext/) and one build for each backend, build/torch-cpu and build/torch-cuda.
Nothing is compiled: a build is the sources with a metadata.json. See https://huggingface.co/docs/kernels.
"""

import base64
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import tomllib


SOURCE = Path(__file__).resolve().parent


def write_repository(dest: Path) -> None:
    """Write the repository.

    Args:
        dest: the folder, which must not exist.

    Raises:
        FileExistsError: the folder exists.
    """
    if dest.exists():
        raise FileExistsError(f"{dest} already exists. Name another folder, or remove it.")
    general = tomllib.loads((SOURCE / "build.toml").read_text(encoding="utf-8"))["general"]
    module = general["name"].replace("-", "_")
    sources = SOURCE / "torch-ext" / module
    digests = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in sorted(sources.glob("*.py"))}
    version_id = hashlib.sha256(b"".join(digests.values())).hexdigest()[:7]
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent) as work:
        new = Path(work, "new")
        code_only = shutil.ignore_patterns("__pycache__")
        shutil.copytree(sources, new / "torch-ext" / module, ignore=code_only)
        for name in general["backends"]:
            build = new / "build" / f"torch-{name}"
            shutil.copytree(sources, build, ignore=code_only)
            metadata = {
                "id": f"_{module}_{name}_{version_id}",
                **{field: general[field] for field in ("name", "version", "license")},
                "python-depends": [],
                "backend": {"type": name},
                "digest": {
                    "algorithm": "sha256",
                    "files": {file: base64.b64encode(digest).decode() for file, digest in digests.items()},
                },
            }
            (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        for name in ("build.toml", "README.md"):
            shutil.copyfile(SOURCE / name, new / name)
        shutil.copyfile(SOURCE.parent / "LICENSE", new / "LICENSE")
        new.rename(dest)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        write_repository(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(str(error))
