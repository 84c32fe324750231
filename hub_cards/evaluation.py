# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What result files of lm-evaluation-harness say."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffllama.checkpoints.json_files import read_json
from diffllama.hub_cards.texts import is_absolute_path


def result_files(path: Path) -> list[Path]:
    """A result file, or the `results_*.json` in a folder and below it, oldest first.

    Raises:
        FileNotFoundError: there are none.
    """
    if path.is_file():
        return [path]
    files = sorted(path.rglob("results_*.json"), key=lambda file: file.name)
    if not files:
        raise FileNotFoundError(f"{path} is no file, and no folder with result files (results_*.json) of lm-eval.")
    return files


def evaluation_rows(paths: Iterable[Path], before: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The numbers in result files, for evaluation.json.

    Args:
        paths: files, or folders with files; of the same measurement the last one counts.
        before: rows that are known already.

    Returns:
        Rows with `task`, `metric` and `value`, and `stderr`, `shots`, `samples`, `dataset`, `dataset_config`, `split`
        and `harness` (its version) as far as a file tells.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a file is none of lm-eval's, or its evaluation is none of a whole benchmark.
    """
    rows = {key(row): row for row in before}
    for path in paths:
        for file in result_files(path):
            rows |= {key(row): row for row in rows_of(file)}
    return list(rows.values())


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What is measured in a row."""
    return row["task"], row["metric"], row.get("shots")


def why_no_benchmark(content: dict[str, Any], task: str) -> str | None:
    """What a task of a result file was evaluated on that is not its whole benchmark, and what to do; or `None`."""
    for subtask in (content.get("group_subtasks") or {}).get(task) or ():
        if fault := why_no_benchmark(content, subtask):
            return fault
    settings = (content.get("configs") or {}).get(task) or {}
    source = (settings.get("metadata") or {}).get("data_source") or {}
    if source.get("built_in"):
        return "the built-in samples, which are made up: name real data with --metadata data=PATH"
    samples = (content.get("n-samples") or {}).get(task) or {}
    original, effective = samples.get("original"), samples.get("effective")
    if original != effective or (content.get("config") or {}).get("limit") is not None:
        part = "a part of its samples" if original is None else f"{effective} of its {original} samples"
        return f"{part}: evaluate without --limit and --samples"
    return None


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The numbers in one result file."""
    content = read_json(file)
    results = content.get("results")
    if not isinstance(results, dict) or not all(isinstance(numbers, dict) for numbers in results.values()):
        raise ValueError(f"{file} is no result file of lm-eval: it has no `results` for tasks.")
    rows = []
    for task, numbers in results.items():
        settings = (content.get("configs") or {}).get(task) or {}
        samples = (content.get("n-samples") or {}).get(task) or {}
        if fault := why_no_benchmark(content, task):
            raise ValueError(f"{file}: {task} was evaluated on {fault}.")
        dataset = settings.get("dataset_path")
        facts = {
            "shots": (content.get("n-shot") or {}).get(task),
            "samples": samples.get("effective"),
            "dataset": None if is_absolute_path(dataset, "dataset_path") else dataset,
            "dataset_config": settings.get("dataset_name"),
            "split": settings.get("test_split") or settings.get("validation_split"),
            "harness": content.get("lm_eval_version"),
        }
        known = {name: value for name, value in facts.items() if value is not None}
        for name, value in numbers.items():
            metric, comma, chosen = name.partition(",")
            if (
                not comma
                or metric.endswith("_stderr")
                or isinstance(value, bool)
                or not isinstance(value, (int, float))
            ):
                continue
            error = numbers.get(f"{metric}_stderr,{chosen}")
            stderr = {"stderr": error} if isinstance(error, (int, float)) else {}
            full = metric if chosen == "none" else f"{metric} ({chosen})"
            rows.append({"task": task, "metric": full, "value": value} | stderr | known)
    return rows
