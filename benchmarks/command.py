# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks list` and `python -m benchmarks run`."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks.cases import CASES, DEFAULT, Sizes, choose
from benchmarks.implementations import ARCHITECTURES, OURS, SHAPE_NAMES, Setting, implementations
from benchmarks.machine import busy_cores as keep_busy
from benchmarks.machine import machine
from benchmarks.results import measure, shown
from diffllama.checkpoints.files import replace_file


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Time differential attention beside other implementations, in one run.",
)


@app.command("list")
def list_cases() -> None:
    """Show all cases."""

    def text(sizes: Sizes) -> str:
        return f"{sizes[0]} × {', '.join(f'{length:,}' for length in sizes[1])}"

    table = Table("case", "what", "batch × tokens, CPU", "GPU", "if none is named")
    for name, case in CASES.items():
        table.add_row(name, case.about, text(case.cpu), text(case.cuda), "yes" if case in choose(DEFAULT) else "")
    Console(width=120).print(table)


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(help="Cases or groups; by default what goals are for, and attention.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each implementation is timed.")] = 7,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the CPU; torch's own number by default.")] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="A GPU if there is one.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="float32 on the CPU, bfloat16 on a GPU by default.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"{', '.join(SHAPE_NAMES)}; small on the CPU, 3b on a GPU by default.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens. May be repeated.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences. May be repeated.")] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Queries of the Llama for each key; the shape's own by default.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are generated from each prompt.")] = 64,
    architecture: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(ARCHITECTURES)}, only these and their Llamas. May be repeated."),
    ] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help=f"Attention functions of ours; {', '.join(OURS)} as far as there.")
    ] = None,
    busy_cores: Annotated[int, typer.Option(min=0, help="Cores that other processes keep busy meanwhile.")] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write the results here too, after every case.")] = None,
) -> None:
    """Check and time cases; print and write ratios to the matched Llama.

    Status 1 if anything was refused because it does not compute what it must.
    """
    chosen = choose(names or DEFAULT)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("There is no CUDA device.")
    shape = shape or ("3b" if on_gpu else "small")
    if shape not in SHAPE_NAMES:
        raise ValueError(f"No shape {shape!r}. Known: {', '.join(SHAPE_NAMES)}.")
    settings = [
        (case, Setting(shape, b, n, dtype or ("bfloat16" if on_gpu else "float32"), device, groups, new_tokens))
        for case in chosen
        for sizes in (case.cuda if on_gpu else case.cpu,)
        for b in batch or [sizes[0]]
        for n in length or sizes[1]
    ]
    compared = [implementations(setting, architecture or ARCHITECTURES, attention) for _, setting in settings]
    if threads:
        torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)  # newer transformers renamed them
    console, where, results = Console(width=150), machine(device, busy_cores), []
    console.print(where)
    for (case, setting), rivals in zip(settings, compared, strict=True):
        Console(stderr=True).print(f"{case.name} ({setting})", style="dim", markup=False)
        with keep_busy(busy_cores):
            result = measure(case, setting, rivals, rounds)
        console.print(shown(case, setting, result))
        results.append(result)
        if output:
            report = {"machine": where, "rounds": rounds, "results": results}
            replace_file(output, json.dumps(report, indent=2) + "\n")
        if on_gpu:
            torch.cuda.empty_cache()
    if any(result["refused"] for result in results):
        raise typer.Exit(1)


def main() -> None:
    """Runs the command line: one line for a wrong value, exit status 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except ValueError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"Error: {error}", markup=False)
        sys.exit(2)
