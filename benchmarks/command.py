# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands `python -m benchmarks list` and `python -m benchmarks run`."""

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
from benchmarks.results import format_record, measure
from diffllama.checkpoints.files import replace_file


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Compare differential attention with other implementations: time and memory, all in one run.",
)


@app.command("list")
def list_cases() -> None:
    """Show all benchmark cases and their default sizes."""

    def text(sizes: Sizes) -> str:
        return f"{sizes[0]} × {', '.join(f'{length:,}' for length in sizes[1])}"

    table = Table("case", "description", "batch × tokens, CPU", "batch × tokens, GPU", "runs by default")
    for name, case in CASES.items():
        table.add_row(name, case.about, text(case.cpu), text(case.cuda), "yes" if case in choose(DEFAULT) else "")
    Console(width=120).print(table)


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(help="Cases or groups. Default: attention, and the model cases with a goal.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 7,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads. Default: PyTorch's.")] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Device. Default: a GPU if present.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Dtype. Default: float32 on a CPU, bfloat16 on a GPU.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"Model size: {', '.join(SHAPE_NAMES)}. Default: small on a CPU, 3b on a GPU.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Sequence length in tokens. May be repeated.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch size in sequences. May be repeated.")] = None,
    groups: Annotated[
        int | None,
        typer.Option(min=1, help="Query heads per key/value head of the Llama. Default: those of the shape."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 64,
    architecture: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Architecture to compare with its Llama: {', '.join(ARCHITECTURES)}. Default: all. May be repeated."
        ),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Attention function of our models. Default: those of {', '.join(OURS)} that can run. May be repeated."
        ),
    ] = None,
    busy_cores: Annotated[int, typer.Option(min=0, help="Number of cores to load with other processes.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--json", help="JSON file for the results, updated after each case.")
    ] = None,
) -> None:
    """Check and time benchmark cases, and print ratios to the matched Llama.

    Exits with status 1 if an implementation was refused because it raised an error or its results are wrong.
    """
    chosen = choose(names or DEFAULT)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device.")
    shape = shape or ("3b" if on_gpu else "small")
    if shape not in SHAPE_NAMES:
        raise ValueError(f"Unknown --shape {shape!r}. Known: {', '.join(SHAPE_NAMES)}.")
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
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)  # transformers renames them
    console, machine_info, results = Console(width=150), machine(device, busy_cores), []
    console.print(machine_info)
    for (case, setting), candidates in zip(settings, compared, strict=True):
        Console(stderr=True).print(f"{case.name} ({setting})", style="dim", markup=False)
        with keep_busy(busy_cores):
            result = measure(case, setting, candidates, rounds)
        console.print(format_record(case, setting, result))
        results.append(result)
        if output:
            report = {"machine": machine_info, "rounds": rounds, "results": results}
            replace_file(output, json.dumps(report, indent=2) + "\n")
        if on_gpu:
            torch.cuda.empty_cache()
    if any(result["refused"] for result in results):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line. A wrong value is one printed line and exit status 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except ValueError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"Error: {error}", markup=False)
        sys.exit(2)
