# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`diffllama probe …`: one command for each probe, whose options are its settings."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from typer.core import TyperGroup

from diffllama.checkpoints.extras import needs
from diffllama.checkpoints.options import DType
from diffllama.evaluation.probes import PROBES, probe_class, settings_class
from diffllama.evaluation.settings import Device


OPTIONS: dict[str, tuple[Any, Any]] = {
    "compare": (
        Annotated[tuple[str, str] | None, typer.Option(metavar="A B", help="Measure two models on the same samples.")],
        None,
    ),
    "dtype": (Annotated[DType, typer.Option(help="Of the computation; auto is the checkpoint's.")], "auto"),
    "device": (Device, None),
    "revision": (Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository.")], None),
    "trust_remote_code": (
        Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the model's folder; ours needs none.")],
        False,
    ),
}
"""Options of the probes that load models -> their type and default."""


def rounded(number: float) -> str:
    """A number as tables show it."""
    return f"{number:.4g}" if abs(number) < 1e3 else f"{number:,.0f}"


def shown(value: dict[str, float]) -> str:
    """A mean with its interval, if it has one."""
    text = rounded(value["mean"])
    return f"{text} [{rounded(value['low'])}, {rounded(value['high'])}]" if "low" in value else text


def tables(report: Any) -> Iterator[Table]:
    """A table for each set of condition fields, with the condition, each model's metrics and their difference."""
    kinds: dict[tuple[str, ...], list[Any]] = {}
    for row in report.rows:
        kinds.setdefault(tuple(row["condition"]), []).append(row)
    yield from (table(rows, report.names) for rows in kinds.values())


def table(rows: list[Any], names: list[str]) -> Table:
    """The table of rows whose conditions have the same fields."""
    conditions = list(rows[0]["condition"])
    metrics = list(dict.fromkeys(name for row in rows for numbers in row["models"] for name in numbers))
    groups = list(names) if len(names) > 1 else [""]
    groups += ["difference"] * any("difference" in row for row in rows)
    headers = [f"{metric}\n{group}".strip() for metric in metrics for group in groups]
    grid = Table(*conditions, Column("samples", justify="right"), *(Column(name, justify="right") for name in headers))
    for row in rows:
        columns = [*row["models"], *([row["difference"]] if "difference" in row else [])]
        values = [shown(numbers[metric]) if metric in numbers else "" for metric in metrics for numbers in columns]
        about = [rounded(value) if isinstance(value, float) else str(value) for value in row["condition"].values()]
        grid.add_row(*about, f"{row['samples']:,}", *values)
    return grid


def short(names: list[str]) -> list[str]:
    """The last parts of paths, if they are distinct; otherwise the paths."""
    last = [Path(name).absolute().name for name in names]
    return last if len(set(last)) == len(names) else names


def command(name: str) -> Callable[..., None]:
    """The function behind `diffllama probe NAME`, whose signature has the probe's settings."""
    kind = settings_class(name)

    def measure(model: Any = None, **options: Any) -> None:
        err = Console(stderr=True, soft_wrap=True, highlight=False)
        output, data, compare = options.pop("output"), options.pop("data", None), options.pop("compare", None)
        loading = {option: options.pop(option) for option in OPTIONS if kind.loads_models and option in options}
        names = [name.rstrip("/") or name for name in compare or (model,) if name is not None]
        if kind.loads_models:
            if (model is None) == (compare is None):
                raise typer.BadParameter("Name one model, or two with --compare A B.")
            if len({Path(name).resolve() for name in names}) < len(names):
                raise typer.BadParameter(f"Name two models with --compare, not {names[0]} twice.")
        for option, value in options.items():
            if any(
                isinstance(number, float) and not math.isfinite(number)
                for number in (value if isinstance(value, list) else [value])
            ):
                raise typer.BadParameter(f"--{option.replace('_', '-')} must be a finite number.")
        with needs("eval"):  # from here on it takes seconds to import
            from transformers.utils import logging

            from diffllama.evaluation.models import ModelSource
            from diffllama.evaluation.runs import ModelSpec, run

            probe = probe_class(name)(**options)
        logging.disable_progress_bar()
        if kind.loads_models:
            sources = [ModelSource(name=name, **loading) for name in names]
            specs = [
                ModelSpec(name, source.facts(), source.load)
                for name, source in zip(short([source.name for source in sources]), sources, strict=True)
            ]
        else:
            specs = probe.specs()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=err) as bar:
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
                err.print("Interrupted. Repeated, the command goes on from here.")
                raise
        if (report.record["data"] or {}).get("path", "").startswith("built-in"):
            err.print("These are the built-in sample's numbers, which say little: name real data with --data.")
        out = Console(highlight=False, markup=False)
        wide = out.options.update(max_width=1000)
        for rows_table in tables(report):
            out.width = max(out.width, out.measure(rows_table, options=wide).maximum)  # no cell loses its number
            out.print(rows_table)
        err.print(f"Wrote {output}", markup=False)

    parameters: dict[str, tuple[Any, Any]] = {}
    if kind.loads_models:
        parameters["model"] = (
            Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder, or repository owner/name.")],
            None,
        )
        parameters |= OPTIONS
    if kind.takes_data:
        parameters["data"] = (
            Annotated[
                Path | None,
                typer.Option(
                    envvar="DIFFLLAMA_DATA",
                    help="File or folder with its data, or a folder of such folders; a built-in sample by default.",
                ),
            ],
            None,
        )
    parameters["output"] = (
        Annotated[Path, typer.Option(help="Folder for results.json, figure.png and the samples.")],
        Path("probes") / name,
    )
    hints = get_type_hints(kind, include_extras=True)
    for setting in dataclasses.fields(kind):
        default = setting.default_factory() if setting.default_factory is not dataclasses.MISSING else setting.default
        parameters[setting.name] = (hints[setting.name], default)
    measure.__signature__ = inspect.Signature(  # type: ignore[attr-defined] # functions may have one; typer reads it
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in parameters.items()
        ]
    )
    measure.__annotations__ = {name: kind for name, (kind, _) in parameters.items()}
    measure.__doc__ = f"\n\nIn the paper: {kind.paper}."
    return measure


class ProbeGroup(TyperGroup):
    """Builds a command only when it is run or asked for help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All probes."""
        return list(PROBES)

    def get_command(self, ctx: Any, name: str) -> Any:
        """A command with a probe's summary alone, for the list of commands; `None` if there is no such probe."""
        return as_command(name, lambda: None) if name in PROBES else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command named by `args`, and the remaining arguments."""
        if args and args[0] in PROBES:
            return args[0], as_command(args[0], command(args[0])), args[1:]
        return super().resolve_command(ctx, args)


def as_command(name: str, function: Callable[..., None]) -> Any:
    """A Typer command that calls `function`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=f"{PROBES[name][1]}{function.__doc__ or ''}")(function)
    return typer.main.get_command(app)
