# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a Transformer and differential models of as many parameters on the same tokens, and compares them.

Every arm is trained with each learning rate on the first seed, and with the rate of the lowest held-out loss on the
other seeds. Repeat the command to continue an interrupted study; its folder may have moved to another machine.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, Field
from rich.console import Console
from ruamel.yaml import YAMLError

from diffllama.checkpoints.files import locked, replace_file
from diffllama.checkpoints.json_files import as_json, read_json
from diffllama.configuration import read_yaml

from . import language, recall
from .arms import TRANSFORMER, check_sizes
from .report import collect, draw_curves, picture, tables
from .runs import Run, disable_progress_bars, train_all
from .text import SEQUENCES


TASKS = {"recall": recall, "language": language}

STARTED = "study.json"
"""File in a study's folder with its settings, written when its data are complete."""


def start(settings: Mapping[str, Any], text: str | None, folder: Path) -> None:
    """Make a study's data in its folder, or check that the study there has these settings.

    Raises:
        ValueError: the folder has a study with other settings than `seeds`, or the text is missing or too short.
    """
    fixed = {name: value for name, value in settings.items() if name != "seeds"}
    if (folder / STARTED).is_file():
        begun = read_json(folder / STARTED)
        if changed := [name for name in begun.keys() | fixed.keys() if begun.get(name) != fixed.get(name)]:
            raise ValueError(
                f"The study in {folder} has other {', '.join(sorted(changed))}. Restore them, or name another --folder."
            )
        return
    if not text:
        raise ValueError(f"{folder} has no study yet. Name a folder with text: --text FOLDER.")
    TASKS[settings["task"]].prepare(settings, text, folder)
    replace_file(folder / STARTED, as_json(fixed))


def make_run(settings: Mapping[str, Any], folder: Path, arm: str, seed: int, learning_rate: float) -> Run:
    """Return the run of an arm. The Transformer is the baseline of the first arm."""
    fields = settings["arms"][next(iter(settings["arms"])) if arm == TRANSFORMER else arm]
    place = folder / "runs" / arm.replace(" ", "_") / f"{learning_rate:g}" / str(seed)
    pretrain = settings["pretrain"]
    own = {"output_dir": str(place / "model"), "seed": seed, "learning_rate": learning_rate}
    return Run(
        arm,
        seed,
        learning_rate,
        {
            **pretrain,
            "model": pretrain["model"] | fields,
            "tokenizer": str(folder / "tokenizer"),
            "data": {
                "files": str(folder / SEQUENCES),
                "column": "input_ids",
                "evaluation_sequences": settings["held_out"],
                "cache_dir": str(folder / "cache"),
            },
            "training": pretrain["training"] | own,
        },
        place,
    )


class Track(BaseModel, extra="forbid"):
    """The settings of a track."""

    task: Literal["recall", "language"]
    seeds: list[int] = Field(min_length=1)
    learning_rates: list[float] = Field(min_length=1)
    held_out: int = Field(ge=1)
    recall: dict[str, Any] = {}
    language: dict[str, Any] = {}
    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    pretrain: dict[str, Any]


@contextmanager
def messages() -> Iterator[None]:
    """End with the message of an error that the user can mend."""
    try:
        yield
    except (ValueError, OSError, YAMLError) as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(str(error), markup=False)
        raise typer.Exit(1) from error


def main(
    settings_file: Annotated[Path, typer.Argument(metavar="TRACK.yaml", help="The settings of a track.")],
    folder: Annotated[Path, typer.Option(help="Folder for the track's data, runs and results.")],
    text: Annotated[str | None, typer.Option(help="Folder with text files, ten or more, better books.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once; they share the cores.")] = 2,
) -> None:
    """Train the runs that are missing, measure them, and write results.json, tables.md and figures into the folder."""
    disable_progress_bars()
    with messages():
        settings = Track.model_validate(read_yaml(settings_file.read_text(encoding="utf-8"))).model_dump(
            exclude_unset=True
        )
        sizes = check_sizes({arm: settings["pretrain"]["model"] | own for arm, own in settings["arms"].items()})
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "name another --folder"):
            start(settings, text, folder)
            first, *others = settings["seeds"]
            rates = settings["learning_rates"]
            grid = [make_run(settings, folder, arm, first, rate) for rate in rates for arm in sizes]
            train_all(grid, jobs, later=len(others) * len(sizes))
            best = {
                arm: min((run for run in grid if run.arm == arm), key=lambda run: run.held_out_loss) for arm in sizes
            }
            repeated = [
                make_run(settings, folder, arm, seed, best[arm].learning_rate) for seed in others for arm in sizes
            ]
            if repeated:
                train_all(repeated, jobs, earlier=len(grid))
            task = TASKS[settings["task"]]
            chosen = [*best.values(), *repeated]
            results = collect(settings, sizes, grid, chosen, lambda run: task.measure(run.output, settings, folder))
            replace_file(folder / "results.json", as_json(results))
            replace_file(folder / "tables.md", tables(results))
            replace_file(folder / "curves.png", picture(draw_curves, results))
            replace_file(folder / "results.png", picture(task.draw, results))


if __name__ == "__main__":
    typer.run(main)
