# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`diffllama probe …`: one command for each probe. A command's options are the probe's settings."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from diffllama.checkpoints.extras import needs
from diffllama.checkpoints.options import DType
from diffllama.evaluation.probes import probe_class
from diffllama.evaluation.settings import PROBES, Device, Settings


@dataclass(kw_only=True)
class ModelOptions:
    """Options of the probes that load models."""

    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder, or repository owner/name.")] = None
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Measure two models on the same samples.")
    ] = None
    dtype: Annotated[DType, typer.Option(help="Dtype of the computation; auto is the checkpoint's.")] = "auto"
    device: Device = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code in the model's folder; differential Llamas need none.")
    ] = False


@dataclass(kw_only=True)
class DataOptions:
    """Options of the probes that read data."""

    data: Annotated[
        Path | None,
        typer.Option(
            envvar="DIFFLLAMA_DATA",
            help="File or folder with the probe's data, or parent of such folders; by default a built-in sample.",
        ),
    ] = None


Output = Annotated[Path, typer.Option(help="Folder for results.json, figure.png and the samples.")]


def rounded(number: float) -> str:
    """Format a number for a table."""
    return f"{number:.4g}" if abs(number) < 1e3 else f"{number:,.0f}"


def shown(value: dict[str, float]) -> str:
    """Format a mean, with its interval if it has one."""
    text = rounded(value["mean"])
    return f"{text} [{rounded(value['low'])}, {rounded(value['high'])}]" if "low" in value else text


def tables(report: Any) -> Iterator[Table]:
    """Make one table per set of condition fields, with conditions, each model's metrics and their difference."""
    kinds: dict[tuple[str, ...], list[Any]] = {}
    for row in report.rows:
        kinds.setdefault(tuple(row["condition"]), []).append(row)
    for conditions, rows in kinds.items():
        metrics = list(dict.fromkeys(name for row in rows for numbers in row["models"] for name in numbers))
        groups = list(report.names) if len(report.names) > 1 else [""]
        groups += ["difference"] * any("difference" in row for row in rows)
        headers = [f"{metric}\n{group}".strip() for metric in metrics for group in groups]
        table = Table(*conditions, *(Column(header, justify="right") for header in ("samples", *headers)))
        for row in rows:
            columns = [*row["models"], *([row["difference"]] if "difference" in row else [])]
            values = [shown(numbers[metric]) if metric in numbers else "" for metric in metrics for numbers in columns]
            about = [rounded(value) if isinstance(value, float) else str(value) for value in row["condition"].values()]
            table.add_row(*about, f"{row['samples']:,}", *values)
        yield table


def short(names: list[str]) -> list[str]:
    """Return the last parts of paths if they are distinct, otherwise the paths."""
    last = [Path(name).absolute().name for name in names]
    return last if len(set(last)) == len(names) else names


def parameters(kind: type[Any]) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters of a function."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            setting.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[setting.name],
            default=setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory(),
        )
        for setting in dataclasses.fields(kind)
    ]


def command(kind: type[Settings]) -> Callable[..., None]:
    """Return the function behind a probe's command; its signature has the probe's settings."""

    def measure(*, output: Path, data: Path | None = None, **options: Any) -> None:
        err = Console(stderr=True, soft_wrap=True, highlight=False)
        loading = {
            option.name: options.pop(option.name) for option in dataclasses.fields(ModelOptions) if kind.loads_models
        }
        model, compare = loading.pop("model", None), loading.pop("compare", None)
        names = [name.rstrip("/") or name for name in compare or (model,) if name is not None]
        if kind.loads_models:
            if (model is None) == (compare is None):
                raise typer.BadParameter("Name either one MODEL or two models with --compare A B.")
            if len({Path(name).resolve() for name in names}) < len(names):
                raise typer.BadParameter(f"--compare needs two different models, got {names[0]} twice.")
        for option, value in options.items():
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise typer.BadParameter(f"--{option.replace('_', '-')} must be a finite number.")
        with needs("eval"):  # these imports take seconds
            from transformers.utils import logging

            from diffllama.evaluation.models import model_spec
            from diffllama.evaluation.runs import run

            probe = probe_class(kind.command)(**options)
        logging.disable_progress_bar()
        if kind.loads_models:
            labels = zip(names, short(names), strict=True)
            specs = [replace(model_spec(name, **loading), name=label) for name, label in labels]
        else:
            specs = probe.specs()
        name_column = TextColumn("{task.description}", markup=False)
        with Progress(name_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err) as bar:
            tasks: dict[str, Any] = {}

            def progress(name: str, done: int, total: int) -> None:
                if name not in tasks:
                    tasks[name] = bar.add_task(name, total=total)
                bar.update(tasks[name], completed=done, total=total)

            def show_note(text: str) -> None:
                err.print(text, markup=False)

            try:
                report = run(probe, specs, output=output, data=data, progress=progress, note=show_note)
            except KeyboardInterrupt:
                err.print("Interrupted. Run the command again to continue.")
                raise
        if (report.record["data"] or {}).get("path", "").startswith("built-in"):
            err.print("These numbers are of the small built-in sample. Name real data with --data.")
        out = Console(highlight=False, markup=False)
        wide = out.options.update(max_width=1000)
        for table in tables(report):
            out.width = max(out.width, out.measure(table, options=wide).maximum)  # no cell loses its number
            out.print(table)
        err.print(f"Wrote {output}", markup=False)

    default = Path("probes") / kind.command
    output = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, annotation=Output, default=default)
    signature = [
        *(parameters(ModelOptions) if kind.loads_models else ()),
        *(parameters(DataOptions) if kind.takes_data else ()),
        output,
        *parameters(kind),
    ]
    measure.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined] # functions may have one
    measure.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    return measure


probes = typer.Typer(no_args_is_help=True)
"""`diffllama probe`."""

for name, kind in PROBES.items():
    probes.command(name, help=f"{kind.__doc__}\n\nIn the paper: {kind.paper}.")(command(kind))
