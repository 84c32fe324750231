# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores in result files of lm-evaluation-harness."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffllama.checkpoints.json_files import read_json
from diffllama.hub_cards.sanitize import is_local_path


def evaluation_rows(paths: Iterable[Path], known: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Read the scores of result files, and of folders with them, for evaluation.json. Newer scores replace older ones.

    Returns:
        Rows with `task`, `metric` and `value`, and `stderr`, `shots`, `samples`, `dataset`, `dataset_config`, `split`
        and `harness` (its version) where a file has them.

    Raises:
        FileNotFoundError: a path does not exist, or there are no result files in it.
        ValueError: a file is not a result file of lm-eval, or the evaluation did not use the whole benchmark.
    """
    rows = {row_key(row): row for row in known}
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("results_*.json"), key=lambda file: file.name)
        if not files:
            raise FileNotFoundError(f"{path} is not a file or a folder with result files (results_*.json) of lm-eval.")
        for file in files:
            rows |= {row_key(row): row for row in read_results(file)}
    return list(rows.values())


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a row: all fields that say what it measures."""
    return row["task"], row["metric"], row.get("shots")


def incomplete_benchmark(content: dict[str, Any], task: str) -> str | None:
    """Describe a partial evaluation of a task, and what to do about it; `None` if it was complete."""
    for subtask in (content.get("group_subtasks") or {}).get(task) or ():
        if fault := incomplete_benchmark(content, subtask):
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


def read_results(file: Path) -> list[dict[str, Any]]:
    """Read the scores of a result file."""
    content = read_json(file)
    results = content.get("results")
    if not isinstance(results, dict) or not all(isinstance(numbers, dict) for numbers in results.values()):
        raise ValueError(f"{file} is not a result file of lm-eval: it has no `results` for tasks.")
    rows = []
    for task, numbers in results.items():
        if fault := incomplete_benchmark(content, task):
            raise ValueError(f"{file}: {task} was evaluated on {fault}.")
        settings, samples = ((content.get(name) or {}).get(task) or {} for name in ("configs", "n-samples"))
        dataset = settings.get("dataset_path")
        facts = {
            "shots": (content.get("n-shot") or {}).get(task),
            "samples": samples.get("effective"),
            "dataset": None if is_local_path(dataset, "dataset_path") else dataset,
            "dataset_config": settings.get("dataset_name"),
            "split": settings.get("test_split") or settings.get("validation_split"),
            "harness": content.get("lm_eval_version"),
        }
        facts = {name: value for name, value in facts.items() if value is not None}
        for name, value in numbers.items():
            metric, comma, filter_name = name.partition(",")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not comma or metric.endswith("_stderr") or not is_number:
                continue
            error = numbers.get(f"{metric}_stderr,{filter_name}")
            stderr = {"stderr": error} if isinstance(error, (int, float)) else {}
            label = metric if filter_name == "none" else f"{metric} ({filter_name})"
            rows.append({"task": task, "metric": label, "value": value} | stderr | facts)
    return rows
