"""The probe of word problems: solvers of known accuracy and length."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffllama.evaluation.datasets.word_problems import LATEX, WORDS, Problem
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.math import Math
from diffllama.evaluation.runs import Report
from support.probe_runs import run_probe
from support.rule_based_lm import rule_based_lm


def measured(output: Path, *loaded_models: LoadedModel, data: Path | None = None, **settings: Any) -> Report:
    return run_probe(Math(**settings), *loaded_models, output=output, data=data)


def solver(known: Callable[[int], bool], thought: str) -> LoadedModel:
    """Answer "What is a + b?" after a thought, correctly if `known(a)`, then continue with another question."""

    def answer(text: str) -> str:
        one, _, two = text.rpartition("What is ")[2].partition("?")[0].split()
        total = int(one) + int(two) + (not known(int(one)))
        return f" {thought} The answer is {total}.\n\nQuestion: What is 7?"

    return rule_based_lm(answer, after="\nAnswer:")


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {one} + 5?", "answer": f"Add. #### {one + 5}"} for one in range(10, 18)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def numbers(report: Report) -> dict[str, tuple[int, list[dict[str, float]]]]:
    return {
        row["condition"]["problems"]: (
            row["samples"],
            [{metric: value["mean"] for metric, value in model.items()} for model in row["models"]],
        )
        for row in report.rows
    }


@pytest.mark.parametrize("shots", [0, 2])
def test_accuracy_and_length_of_a_solver(shots: int, sums: Path, tmp_path: Path) -> None:
    report = measured(tmp_path, solver(lambda one: one < 16, "Hm."), data=sums, shots=shots, max_tokens=60)
    length = len(" Hm. The answer is ")
    assert numbers(report) == {
        "all": (8, [{"accuracy": 0.75, "stated": 1.0, "tokens": length}]),
        "solved": (6, [{"tokens": length}]),
        "missed": (2, [{"tokens": length}]),
    }
    assert report.outcomes[0]["sums.jsonl:7"].detail == {
        "completion": " Hm. The answer is 23.\n\n",
        "answer": "23.",
        "right": "22",
    }


def test_two_solvers_are_compared_on_what_both_solved_or_missed(sums: Path, tmp_path: Path) -> None:
    quick, slow = solver(lambda one: one < 16, "Hm."), solver(lambda one: one > 11, "Let me see: hm.")
    report = measured(tmp_path, quick, slow, data=sums, shots=0, max_tokens=60)
    short, long = len(" Hm. The answer is "), len(" Let me see: hm. The answer is ")
    assert numbers(report) == {
        "all": (
            8,
            [{"accuracy": 0.75, "stated": 1.0, "tokens": short}, {"accuracy": 0.75, "stated": 1.0, "tokens": long}],
        ),
        "solved": (4, [{"tokens": short}, {"tokens": long}]),
    }
    assert report.rows[0]["difference"]["tokens"] == dict.fromkeys(("mean", "low", "high"), 12.0)


def test_truncated_completion_counts_all_its_tokens(sums: Path, tmp_path: Path) -> None:
    loaded = rule_based_lm(lambda text: " 15 or 16" + " hm" * 100, after="\nAnswer:")
    report = measured(tmp_path, loaded, data=sums, shots=0, max_tokens=30)
    assert numbers(report)["all"] == (8, [{"accuracy": 0.125, "stated": 0.0, "tokens": 30.0}])


def test_chat_templates_and_boxes(sums: Path, tmp_path: Path) -> None:
    first = "<user>What is 10 + 5?\n\nReason step by step"
    loaded = rule_based_lm(lambda text: "Question: \\boxed{15}" if text.startswith(first) else "?", after="<assistant>")
    with pytest.raises(ValueError, match=r"tokenizer of rule_based_lm has no chat template\. Leave --chat out"):
        measured(tmp_path / "none", loaded, data=sums, chat=True)
    loaded.tokenizer.chat_template = (
        "<user>{{ messages[0].content }}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    report = measured(tmp_path, loaded, data=sums, chat=True, max_tokens=30)
    tokens = (len("Question: ") + 7 * len("?")) / 8
    assert numbers(report)["all"] == (8, [{"accuracy": 0.125, "stated": 0.125, "tokens": tokens}])


@pytest.mark.parametrize("task", ["svamp", "math"])
def test_examples_stand_before_the_problem(task: str) -> None:
    loaded = rule_based_lm(lambda text: "", after="\nAnswer:")
    shown = "".join(f"Question: {one}\nAnswer: {two}\n\n" for one, two in (LATEX if task == "math" else WORDS)[:2])
    for shots, before in [(0, ""), (2, shown)]:
        ids = Math(task=task, shots=shots).prompt(loaded, Problem("Why?", "7"))
        assert loaded.tokenizer.decode(ids) == f"{before}Question: Why?\nAnswer:"


def test_problems_are_drawn_by_the_seed(sums: Path, tmp_path: Path) -> None:
    loaded = solver(lambda one: True, "")
    drawn = [
        list(measured(tmp_path / str(run), loaded, data=sums, problems=4, seed=seed, max_tokens=1).outcomes[0])
        for run, seed in enumerate((0, 0, 1))
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4
    assert set(drawn[0]) != set(drawn[2])
    assert len(measured(tmp_path / "all", loaded, data=sums, problems=99, max_tokens=1).outcomes[0]) == 8
