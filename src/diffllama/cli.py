# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command is a thin front of a function of the package."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from diffllama import __version__
from diffllama.choices import TARGETS, DType, Pairing, Source, Variant


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


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
    src: Annotated[str, typer.Argument(metavar="SRC", help="Folder, file, or repository owner/name of the Hub.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to make.")],
    source: Annotated[Source | None, typer.Option("--from", help="What SRC is; DEST will be ours.")] = None,
    target: Annotated[
        str | None, typer.Option("--to", metavar="|".join(TARGETS), help="SRC is ours; what DEST will be.")
    ] = None,
    variant: Annotated[Variant | None, typer.Option(help="With --from llama: v2, exact, or v1, a warm start.")] = None,
    pairing: Annotated[
        Pairing | None, typer.Option(help="With --from unilm-v1: plain if trained with multihead_diffattn.py.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository.")] = None,
    dtype: Annotated[DType, typer.Option(help="dtype of the weights; auto keeps the source's.")] = "auto",
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="Compare both models' logits. By default if they fit into memory."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DEST if it is a model folder.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
) -> None:
    """Convert a checkpoint into a differential model, or a differential model into another format.

    \b
    --from llama         Llama, Mistral, Qwen2, Qwen3, SmolLM3, Phi-3, GGUF files -> V2, logits bit-identical
                         (float32, bfloat16); with --variant v1 -> V1, not exact
    --from transformers  transformers' own diffllama -> V1
    --from unilm-v1      microsoft/unilm's modules -> V1
    --from unilm-v2      microsoft/unilm's modules -> V2
    --to NAME            the other way

    Folders of ours load anywhere with trust_remote_code=True. DEST appears complete or not at all.
    """
    err.print(f"Reading {src}", markup=False)
    from transformers.utils import logging

    from diffllama.conversion import Verification
    from diffllama.conversion import convert as run  # takes seconds to import

    logging.disable_progress_bar()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("Writing weights", total=None, visible=False)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)
            if done == total:
                bar.update(task, description="Weights written; comparing" if verify is not False else "Weights written")

        folder = run(
            src,
            dest,
            source=source,
            target=target,
            variant=variant,
            pairing=pairing,
            revision=revision,
            dtype=dtype,
            verify=verify,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            progress=show,
        )
    record = json.loads((folder / "conversion.json").read_bytes())["verification"]
    skipped = record.get("skipped")
    err.print(f"Not verified: {skipped}." if skipped else str(Verification.from_dict(record)), markup=False)
    err.print(f"Wrote {folder}", markup=False)


def main() -> None:
    """Runs the command line: one line for an error (a list if there are several), no traceback, exit status 1."""
    for name in ("SIGTERM", "SIGHUP"):  # end like an error, so that unfinished files are removed
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        app()
    except Exception as error:
        # Whatever a library raises on a broken file is the user's news, not a bug report.
        err.print(f"[red]Error:[/red] {type(error).__name__}: ", end="")
        text = str(error) if type(error).__name__ == "CheckpointError" else " ".join(str(error).split())
        err.print(text or "no message", markup=False)
        sys.exit(1)
