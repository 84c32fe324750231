# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Write a Hugging Face Space that explores a model."""

import shutil
import sys
from importlib import import_module
from importlib.metadata import distribution, requires, version
from pathlib import Path
from typing import Any

from huggingface_hub import SpaceCard, SpaceCardData
from packaging.requirements import Requirement

from diffllama.checkpoints.folders import new_folder
from diffllama.checkpoints.versions import VERSION, commit, licence
from diffllama.hub_cards.hub_folder import export


FOLDERS = (
    "checkpoints",
    "configuration",
    "conversion",
    "evaluation",
    "hub_cards",
    "kernels",
    "modeling_diff",
    "training",
)
"""Packages within this one. A Space contains them all, and so does not depend on where this package is published."""

APP = '''\
"""Serves the explorer of the model in the folder `model`."""

import os

from diffllama.explorer.run import explore


explore("model", host="0.0.0.0", port=int(os.environ.get("GRADIO_SERVER_PORT", "7860")))
'''

CARD = """\
---
{data}
---

# {title}

Chat with the differential model in the folder `model`, and see its attention maps. Made by `diffllama export --space`.
"""


def requirements() -> list[str]:
    """Return what the explorer needs. Spaces install Gradio themselves, in the version that the card names."""
    needed = []
    for line in requires("diffllama") or []:
        requirement = Requirement(line)
        if requirement.name != "gradio" and (
            requirement.marker is None or requirement.marker.evaluate({"extra": "explore"})
        ):
            requirement.marker = None
            needed.append(str(requirement))
    return needed


def write_space(src: Path, dest: Path, metadata: dict[str, Any], **options: Any) -> Path:
    """Write a Space of a diffllama model: the exported model, this package, app.py, requirements and a card.

    The folder appears at `dest` complete, or not at all.

    Args:
        src: as in `export`.
        dest: the folder to write; it must not exist, or be empty.
        metadata: of the model's card, as in `export`.
        options: as in `export`.

    Returns:
        `dest`.

    Raises:
        FileExistsError: `dest` is not empty.
        Exception: as `export`.
    """
    with new_folder(dest) as folder:
        export(src, folder / "model", metadata=metadata, **options)
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in ("diffllama", *(f"diffllama.{part}" for part in FOLDERS)):
            (source,) = import_module(name).__path__
            shutil.copytree(source, folder / name.replace(".", "/"), ignore=ignored, dirs_exist_ok=True)
        about = folder / f"diffllama-{VERSION}.dist-info"  # what Python reads a package's version and requirements from
        about.mkdir()
        texts = {
            "diffllama/LICENSE": licence(),
            "diffllama/_commit.txt": commit() or "",
            f"{about.name}/METADATA": distribution("diffllama").read_text("METADATA") or "",
            "app.py": APP,
            "requirements.txt": "\n".join([*requirements(), ""]),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        data = SpaceCardData(
            title=dest.name,
            sdk="gradio",
            sdk_version=version("gradio"),
            python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
            app_file="app.py",
            license=metadata.get("license"),
        )
        SpaceCard(CARD.format(data=data.to_yaml(), title=dest.name)).save(folder / "README.md")
    return dest
