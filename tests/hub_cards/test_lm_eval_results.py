import json
from pathlib import Path
from typing import Any

import pytest

from diffllama.hub_cards.lm_eval_results import evaluation_rows


def result_file(path: Path, changes: dict[str, Any] | None = None, **numbers: Any) -> Path:
    """Return the content of lm-eval 0.4.13's result file of a 0-shot task with these numbers, with changes."""
    path.parent.mkdir(exist_ok=True)
    settings = {"task": "arc_easy", "dataset_path": "allenai/ai2_arc", "dataset_name": "ARC-Easy", "test_split": "test"}
    settings["metadata"] = {"data_source": {"built_in": False}}
    content = {
        "results": {"arc_easy": {"alias": "arc_easy", "sample_len": 100, **numbers}},
        "configs": {"arc_easy": settings},
        "versions": {"arc_easy": 1.0},
        "n-shot": {"arc_easy": 0},
        "higher_is_better": {"arc_easy": {"acc": True, "acc_norm": True}},
        "n-samples": {"arc_easy": {"original": 2376, "effective": 2376}},
        "config": {"model": "hf", "limit": None},
        "git_hash": None,
        "lm_eval_version": "0.4.13",
    }
    path.write_text(json.dumps(content | (changes or {})))
    return path


FACTS = {
    "shots": 0, "samples": 2376, "dataset": "allenai/ai2_arc", "dataset_config": "ARC-Easy",
    "split": "test", "harness": "0.4.13",
}  # fmt: skip
NUMBERS = {"acc,none": 0.25, "acc_stderr,none": 0.04, "acc_norm,none": 0.5, "acc_norm_stderr,none": "N/A"}


def test_each_metric_is_a_row(tmp_path: Path) -> None:
    file = result_file(tmp_path / "results_1.json", **NUMBERS, **{"fast,none": True})
    rows = [
        {"task": "arc_easy", "metric": "acc", "value": 0.25, "stderr": 0.04} | FACTS,
        {"task": "arc_easy", "metric": "acc_norm", "value": 0.5} | FACTS,
    ]
    assert evaluation_rows([file]) == rows
    text = file.read_text().replace("test_split", "validation_split")
    file.write_text(text.replace("allenai/ai2_arc", "/home/me/arc"))
    for row in rows:
        del row["dataset"]  # a local path
    assert evaluation_rows([file]) == rows


def test_metrics_have_the_names_of_their_filters(tmp_path: Path) -> None:
    file = result_file(tmp_path / "r.json", **{"exact_match,strict-match": 0.1, "exact_match,flexible-extract": 0.2})
    metrics = {row["metric"]: row["value"] for row in evaluation_rows([file])}
    assert metrics == {"exact_match (strict-match)": 0.1, "exact_match (flexible-extract)": 0.2}


def test_newer_results_replace_older_ones(tmp_path: Path) -> None:
    result_file(tmp_path / "a" / "results_2026-01-02.json", **{"acc,none": 0.3})
    result_file(tmp_path / "b" / "results_2026-01-01.json", **{"acc,none": 0.2})
    before = [{"task": "arc_easy", "metric": "acc", "value": 0.1, "shots": shots} for shots in (0, 5)]
    rows = evaluation_rows([tmp_path], [*before, {"task": "piqa", "metric": "acc"}])
    assert [(row["task"], row.get("value")) for row in rows] == [("arc_easy", 0.3), ("arc_easy", 0.1), ("piqa", None)]


BUILT_IN = {"arc_easy": {"metadata": {"data_source": {"built_in": True}}}}
NO_BENCHMARKS: dict[str, tuple[dict[str, Any], str]] = {
    "limit": ({"config": {"limit": 100.0}}, "arc_easy was evaluated on 2376 of its 2376 samples: .*--limit"),
    "samples": ({"n-samples": {"arc_easy": {"original": 2376, "effective": 7}}}, "7 of its 2376 samples: .*--samples"),
    "limit, not counted": ({"config": {"limit": 8}, "n-samples": {}}, "a part of its samples"),
    "built-in samples": ({"configs": BUILT_IN}, "built-in samples, which are made up: .*--metadata data=PATH"),
    "a group of them": (
        {"configs": BUILT_IN, "results": {"all": {"acc,none": 1.0}}, "group_subtasks": {"all": ["arc_easy"]}},
        "all was evaluated on the built-in samples",
    ),
}


@pytest.mark.parametrize("kind", NO_BENCHMARKS)
def test_part_of_a_benchmark_is_refused(kind: str, tmp_path: Path) -> None:
    changes, message = NO_BENCHMARKS[kind]
    file = result_file(tmp_path / "results_1.json", changes, **NUMBERS)
    with pytest.raises(ValueError, match=rf"results_1\.json: {message}" if "evaluated" in message else message):
        evaluation_rows([file])


@pytest.mark.parametrize("content", ["", "{}", '{"results": {"x": 1}}', "[]"])
def test_other_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "results_1.json").write_text(content)
    with pytest.raises(ValueError, match=r"results_1.json"):
        evaluation_rows([tmp_path])


def test_path_without_results_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=str(path)):
            evaluation_rows([path])
