# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Train the runs of a track by `diffllama pretrain`, several at once, and continue those that were interrupted."""

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import torch
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from ruamel.yaml import YAML
from transformers import TrainerCallback
from transformers.utils import logging

from diffllama.checkpoints.json_files import read_json
from diffllama.training import pretrain

from .arms import TRANSFORMER


@dataclass(frozen=True)
class Run:
    """One training of an arm.

    Args:
        arm: its name.
        seed: of the weights and of the order of the sequences.
        learning_rate: the highest.
        settings: the content of the run's pre-training file.
        folder: where that file is, and the output folder.
    """

    arm: str
    seed: int
    learning_rate: float
    settings: Mapping[str, Any]
    folder: Path

    @property
    def output(self) -> Path:
        """The output folder of `pretrain`."""
        return self.folder / ("model-baseline" if self.arm == TRANSFORMER else "model")

    @property
    def tokens(self) -> int:
        """How many tokens the run reads in all."""
        return self.settings["training"]["max_steps"] * self.settings["tokens_per_step"]

    @property
    def finished(self) -> bool:
        """Whether the run has ended. `pretrain` writes the state last."""
        return (self.output / "trainer_state.json").is_file()

    def logged(self, metric: str) -> list[tuple[int, float]]:
        """Return (tokens, value) of each time that the finished run logged a metric."""
        history = read_json(self.output / "trainer_state.json")["log_history"]
        steps = {entry["step"]: entry[metric] for entry in history if metric in entry}  # a resumed run repeats some
        return [(step * self.settings["tokens_per_step"], value) for step, value in sorted(steps.items())]

    @property
    def held_out_loss(self) -> float:
        """The loss on the held-out sequences after the last step."""
        return self.logged("eval_loss")[-1][1]


class ReportSteps(TrainerCallback):
    """Puts the number of tokens of each step into a queue; at the beginning, of those before the checkpoint."""

    def __init__(self, tokens_per_step: int, queue: "Queue[int | None]") -> None:
        self.tokens_per_step, self.queue = tokens_per_step, queue

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the steps before the checkpoint."""
        self.queue.put(self.tokens_per_step * state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report a step."""
        self.queue.put(self.tokens_per_step)


_queue: "Queue[int | None]"


def disable_progress_bars() -> None:
    """Leave only the study's own bars."""
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def exit_with_parent() -> None:
    """Wait until the study's process has ended, also if it was killed, and end this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def start_worker(queue: "Queue[int | None]", threads: int) -> None:
    """Prepare a process that trains."""
    global _queue
    _queue = queue
    Thread(target=exit_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    disable_progress_bars()


def train(run: Run) -> None:
    """Train a run, or continue it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    file = run.folder / "pretrain.yaml"
    with file.open("w", encoding="utf-8") as stream:
        YAML(typ="safe", pure=True).dump(dict(run.settings), stream)
    with (run.folder / "log.txt").open("a", buffering=1, encoding="utf-8") as log, redirect_stdout(log):
        pretrain(file, run.arm == TRANSFORMER, [ReportSteps(run.settings["tokens_per_step"], _queue)])


class Speed(ProgressColumn):
    """The number of tokens per second."""

    def render(self, task: Task) -> Text:
        """Show the speed since the study went on, of all runs together."""
        return Text(f"{task.finished_speed or task.speed or 0:,.0f} tokens/s")


def train_all(runs: Sequence[Run], jobs: int, earlier: int = 0, later: int = 0) -> None:
    """Train the runs that have not finished, `jobs` at once, each with its share of the cores. Raises as `pretrain`.

    The progress bar also counts `earlier` runs, which have finished, and `later` ones. All have as many tokens.
    """
    missing = [run for run in runs if not run.finished]
    context = multiprocessing.get_context("spawn")
    queue: Queue[int | None] = context.Queue()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), Speed())
    with Progress(*columns, speed_estimate_period=120) as bar:
        total = earlier + len(runs) + later
        task = bar.add_task(
            f"{len(missing) + later} of {total} runs left",
            total=total * runs[0].tokens,
            completed=(total - later - len(missing)) * runs[0].tokens,
        )

        def show() -> None:
            while (tokens := queue.get()) is not None:
                bar.advance(task, tokens)

        watcher = Thread(target=show, daemon=True)
        watcher.start()
        threads = max(1, (os.cpu_count() or 1) // jobs)
        with ProcessPoolExecutor(jobs, context, start_worker, (queue, threads)) as pool:
            futures = [pool.submit(train, run) for run in missing]
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    future.result()
                    bar.update(task, description=f"{len(missing) - number + later} of {total} runs left")
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            finally:
                queue.put(None)
        watcher.join()
