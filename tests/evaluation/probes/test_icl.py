"""Many-shot classification by models that follow rules."""

from itertools import pairwise
from pathlib import Path

import pytest

from diffllama.evaluation.datasets.data import find
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.icl import SEPARATOR, ManyShot
from diffllama.evaluation.runs import Report
from support.probe_runs import run_probe
from support.rule_based_lm import rule_based_lm


def copier() -> LoadedModel:
    """Answer as the example whose question has the same first word; without one, with z, which no class begins with."""

    def answer(text: str) -> str:
        *demonstrations, question = text.split(SEPARATOR)
        word = question.split()[1]
        same = (one.split("Type:")[1] for one in demonstrations if one.split()[1] == word)
        return next(same, "z") + SEPARATOR

    return rule_based_lm(answer, after="Type:")


def trec(folder: Path) -> Path:
    """Eight words to learn. `abbreviation`, alphabetically first, is right for none."""
    codes = ["HUM:ind", "LOC:city", "NUM:date", "DESC:def", "ENTY:food", "LOC:state", "HUM:gr", "NUM:dist"]
    train = [f"{code} w{number} was it" for number, code in enumerate(codes)]
    (folder / "train.txt").write_text("\n".join([*train, "ABBR:exp nothing", "NUM:dist w7 will it"]))
    (folder / "test.txt").write_text("\n".join(f"{code} w{number} will it" for number, code in enumerate(codes)))
    return folder


def accuracies(report: Report) -> dict[int, float]:
    return {row["condition"]["shots"]: row["models"][0]["accuracy"]["mean"] for row in report.rows}


def test_each_demonstration_answers_one_question(tmp_path: Path) -> None:
    report = run_probe(ManyShot(length=1000), copier(), output=tmp_path / "out", data=trec(tmp_path))
    assert {row["samples"] for row in report.rows} == {8}
    last = report.rows[-1]["condition"]["shots"]
    assert last == 9  # all but the one that is also a test question
    place = ManyShot().choose(list(range(9))).index(8)  # of the example that no question copies
    assert accuracies(report) == {shots: (shots - (place < shots)) / 8 for shots in (1, 2, 4, 8, 9)}
    answers = {outcome.detail["answer"] for outcome in report.outcomes[0].values()}
    assert "abbreviation" in answers  # the class chosen for an impossible answer


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


def test_length_too_short_for_a_demonstration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No demonstration fits into 60 tokens\. Raise --length"):
        run_probe(ManyShot(length=60), copier(), output=tmp_path / "out", data=trec(tmp_path))
