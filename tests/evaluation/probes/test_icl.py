"""Many-shot classification by models of which it is known what they answer."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diffllama.evaluation.datasets.data import find
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.icl import SEPARATOR, ManyShot
from diffllama.evaluation.runs import ModelSpec, Report, run
from diffllama.evaluation.settings import ClassificationTask
from support.rule_based_lm import rule_based_lm
from support.tiny_loaded_models import KINDS, tiny_loaded_model


def measured(load: Callable[[], LoadedModel], output: Path, data: Path | None = None, **settings: Any) -> Report:
    return run(ManyShot(**settings), [ModelSpec("model", {}, load)], output=output, data=data)


def copier() -> LoadedModel:
    """Answers as the demonstration does whose question begins with the same word; without one, with an impossible z."""

    def answer(text: str) -> str:
        *demonstrations, question = text.split(SEPARATOR)
        word = question.split()[1]
        same = (one.split("Type:")[1] for one in demonstrations if one.split()[1] == word)
        return next(same, "z") + SEPARATOR

    return rule_based_lm(answer, after="Type:")


def trec(folder: Path) -> Path:
    """Eight words to learn; `abbreviation`, first in the alphabet, is right for none."""
    codes = ["HUM:ind", "LOC:city", "NUM:date", "DESC:def", "ENTY:food", "LOC:state", "HUM:gr", "NUM:dist"]
    train = [f"{code} w{number} was it" for number, code in enumerate(codes)]
    (folder / "train.txt").write_text("\n".join([*train, "ABBR:exp nothing", "NUM:dist w7 will it"]))
    (folder / "test.txt").write_text("\n".join(f"{code} w{number} will it" for number, code in enumerate(codes)))
    return folder


def accuracies(report: Report) -> dict[int, float]:
    return {row["condition"]["shots"]: row["models"][0]["accuracy"]["mean"] for row in report.rows}


def test_each_demonstration_answers_one_question(tmp_path: Path) -> None:
    report = measured(copier, tmp_path / "out", trec(tmp_path), length=1000)
    assert {row["samples"] for row in report.rows} == {8}
    last = report.rows[-1]["condition"]["shots"]
    assert last == 9  # all but the one that is also a test question
    place = ManyShot().choose(list(range(9))).index(8)  # of the demonstration that answers nothing
    assert accuracies(report) == {shots: (shots - (place < shots)) / 8 for shots in (1, 2, 4, 8, 9)}
    answers = {outcome.detail["answer"] for outcome in report.outcomes[0].values()}
    assert "abbreviation" in answers  # what an impossible answer becomes


def test_prompts_fill_the_length_and_grow_at_their_end(tmp_path: Path) -> None:
    source, loaded = find("trec", trec(tmp_path)), copier()
    for length in (180, 181, 240, 400):
        trials = list(ManyShot(length=length, task="trec-fine").samples(source, loaded).values())
        answers = [len(ids) for ids in trials[0].options.values()]
        demonstration = len("Question: w0 was it\nType:") + max(answers)
        longest = max(len(one.context) + len(one.question) for one in trials) + max(answers)
        assert length - demonstration < longest <= length
    contexts = list(dict.fromkeys(tuple(one.context) for one in trials))
    assert len(contexts) > 2
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(contexts))


def test_a_length_into_which_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No demonstration fits into 60 tokens\. Ask for more with --length"):
        measured(copier, tmp_path / "out", trec(tmp_path), length=60)


@pytest.mark.parametrize(("kind", "task"), zip(KINDS, ("trec", "banking77", "clinc150"), strict=True))
def test_any_model_can_be_probed_and_a_run_goes_on(kind: str, task: ClassificationTask, tmp_path: Path) -> None:
    settings = {"task": task, "length": 400, "questions": 4}
    report = measured(lambda: tiny_loaded_model(kind), tmp_path, **settings)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rows"] == report.rows
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert [row["condition"]["shots"] for row in report.rows][:3] == [1, 2, 4]

    file = tmp_path / "samples-1.jsonl"
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:-3]))
    assert measured(lambda: tiny_loaded_model(kind), tmp_path, **settings).rows == report.rows
    assert sorted(file.read_text().splitlines(keepends=True)) == sorted(kept)
