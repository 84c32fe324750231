# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command is a thin front of a function of the package."""

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from diffllama import __version__


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


class Source(str, enum.Enum):
    """Checkpoints that can be converted."""

    llama = "llama"


class DType(str, enum.Enum):
    """Dtypes of converted weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def show_version(value: bool) -> None:
    """Prints the version and leaves."""
    if value:
        print(f"diffllama {__version__}")
        raise typer.Exit


@app.callback()
def diffllama(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Differential attention as a Hugging Face model."""


@app.command()
def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a Transformers checkpoint, or a GGUF file.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to make.")],
    source: Annotated[Source, typer.Option("--from", help="What SRC is.")],
    dtype: Annotated[DType, typer.Option(help="dtype of the weights; auto keeps the source's.")] = DType.auto,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DEST if it is a model folder.")] = False,
) -> None:
    """Convert a checkpoint into a folder that loads anywhere with trust_remote_code=True.

    --from llama: a Llama becomes DIFF V2 with bit-identical logits (float32 and bfloat16).
    """
    err.print(f"Reading {src}", markup=False)
    from diffllama.conversion import convert as run  # takes seconds to import

    columns = (TextColumn("Converting tensors"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("", total=None, visible=False)
        folder = run(
            src,
            dest,
            source=source.value,
            dtype=dtype.value,
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total, visible=True),
        )
    err.print(f"Wrote {folder}", markup=False)


def main() -> None:
    """Runs the command line: one line for an error, no traceback, exit status 1."""
    try:
        app()
    except Exception as error:
        # Whatever a library raises on a broken file is the user's news, not a bug report.
        err.print(f"[red]Error:[/red] {type(error).__name__}: ", end="")
        err.print(" ".join(str(error).split()) or "no message", markup=False)
        sys.exit(1)
