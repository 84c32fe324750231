"""The stock `lm_eval --model vllm` gives the results of `--model hf`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


pytest.importorskip("vllm")
pytest.importorskip("lm_eval")

FOLDER = Path(__file__).parents[2] / "build/vllm/smollm2"
ITEMS = [
    ("Question: What do bees make?\nAnswer:", [" honey", " milk", " paper clips"], 0),
    ("Question: Which is the largest?\nAnswer:", [" an ant", " a cat", " an elephant"], 2),
    ("Question: What is the capital of France?\nAnswer:", [" Rome", " Paris", " Berlin"], 1),
    ("Question: How many days are in a week?\nAnswer:", [" seven", " ten", " two hundred"], 0),
    ("The opposite of hot is", [" cold.", " warm.", " sunny."], 0),
    ("Fish live in", [" trees.", " water.", " the desert."], 1),
]
TASK = """
task: items
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ARGUMENTS = {"hf": "dtype=float32", "vllm": "dtype=float32,enforce_eager=True,max_model_len=256,max_num_seqs=8"}


def evaluate(model: str, work: Path) -> tuple[dict[str, float], list[list[float]]]:
    """Return accuracies, and the log-likelihood of every choice of every item."""
    words = [sys.executable, "-m", "lm_eval", "--model", model, "--tasks", "items", "--include_path", str(work)]
    words += ["--model_args", f"pretrained={FOLDER},trust_remote_code=True,{ARGUMENTS[model]}", "--batch_size", "4"]
    words += ["--output_path", str(work / model), "--log_samples", *(["--device", "cpu"] if model == "hf" else [])]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (work / model).rglob("results_*.json")
    (samples,) = (work / model).rglob("samples_*.jsonl")
    found: dict[str, Any] = json.loads(results.read_text())["results"]["items"]
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    likelihoods = [[float(response[0][0]) for response in row["resps"]] for row in rows]
    return {name: value for name, value in found.items() if name in ("acc,none", "acc_norm,none")}, likelihoods


def test_accuracies_and_log_likelihoods_are_those_of_hf(tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    rows = [{"query": query, "choices": choices, "gold": gold} for query, choices, gold in ITEMS]
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "items.yaml").write_text(TASK.replace("ITEMS", str(items)))
    (accuracies, likelihoods), (expected, truth) = (evaluate(model, tmp_path) for model in ("vllm", "hf"))
    assert len(accuracies) == 2
    assert accuracies == expected
    assert [len(row) for row in likelihoods] == [3] * len(ITEMS)
    for found, true in zip(likelihoods, truth, strict=True):
        assert found == pytest.approx(true, abs=1e-3)
