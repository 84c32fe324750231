"""The probe of needles, with models that follow rules."""

import re
from pathlib import Path

import pytest

from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.needles import Needles
from diffllama.evaluation.runs import Report
from support.probe_runs import run_probe
from support.rule_based_lm import rule_based_lm


def measured(loaded: LoadedModel, output: Path, **settings: object) -> Report:
    probe = Needles(**({"length": [600, 900], "depth": [0.0, 1.0], "samples_per_condition": 3} | settings))
    return run_probe(probe, loaded, output=output)


def remembers(text: str, near: int) -> str:
    """Answer with the requested numbers in the last `near` letters of a text."""
    cities = re.findall(r"[A-Z]\w+", text.rpartition("Question: What")[2].partition("?")[0])
    known = dict(re.findall(r"The magic number of (\w+) is (\d+)\.", text[-near:]))
    return " " + " and ".join(known.get(city, "nothing") for city in cities) + "."


def test_model_that_finds_every_needle(tmp_path: Path) -> None:
    report = measured(rule_based_lm(lambda text: remembers(text, 10_000), after="re"), tmp_path, needles=["2_of_2"])
    assert [row["models"][0]["accuracy"]["mean"] for row in report.rows] == [1.0] * len(report.rows)


def test_model_that_remembers_the_end(tmp_path: Path) -> None:
    loaded = rule_based_lm(lambda text: remembers(text, 250), after=" is")
    report = measured(loaded, tmp_path, needles=["1_of_1"], samples_per_condition=6)
    accuracies = {
        (row["condition"]["length"], row["condition"]["depth"]): row["models"][0]["accuracy"] for row in report.rows
    }
    expected = {0.0: 0.0, 1.0: 1.0, "all": 0.5}  # the same for every text
    assert accuracies == {
        (length, depth): {"mean": accuracy, "low": accuracy, "high": accuracy}
        for length in (600, 900)
        for depth, accuracy in expected.items()
    }
    assert [row["samples"] for row in report.rows] == 6 * [6]


def test_only_the_first_line_is_an_answer(tmp_path: Path) -> None:
    loaded = rule_based_lm(lambda text: f" 7.\n{remembers(text, 10_000)}", after=" is")
    report = measured(loaded, tmp_path, needles=["1_of_1", "1_of_6"], length=[900], depth=[0.5])
    assert [row["models"][0]["accuracy"]["mean"] for row in report.rows] == [0.0] * 4
    assert {outcome.detail["answer"] for outcome in report.outcomes[0].values()} == {" 7."}


@pytest.mark.parametrize("wrong", ["6", "6/2", "3_of_2", "0_of_0", "1_of_0", "a_of_b", "1_of_99"])
def test_wrong_needles_are_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--needles must be R_of_N.*{wrong}"):
        measured(rule_based_lm(lambda _: "", " is"), tmp_path, needles=[wrong])
