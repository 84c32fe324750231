"""Orders of in-context examples, and models that follow rules."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from diffllama.evaluation.datasets.classification import Example
from diffllama.evaluation.datasets.data import find
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.icl import SEPARATOR
from diffllama.evaluation.probes.icl_order import ShotOrder, alternate, by_chance, spread
from support.probe_runs import run_probe
from support.rule_based_lm import rule_based_lm


def echo() -> LoadedModel:
    """Answer as the last example."""
    return rule_based_lm(lambda text: text.split(SEPARATOR)[-2].split("Type:")[1] + SEPARATOR, after="Type:")


def steady() -> LoadedModel:
    """Answer `human` for all examples."""
    return rule_based_lm(lambda _: " human" + SEPARATOR, after="Type:")


def trec(folder: Path) -> Path:
    """Two classes, of which one has 6 of 8 test questions."""
    train = [f"{code} question {number}" for number in range(10) for code in ("HUM:ind", "LOC:city")]
    test = ["HUM:ind"] * 6 + ["LOC:city"] * 2
    (folder / "train.txt").write_text("\n".join(train))
    (folder / "test.txt").write_text("\n".join(f"{code} asked {number}" for number, code in enumerate(test)))
    return folder


def test_classes_take_turns() -> None:
    examples = [Example(text, text[0]) for text in ("a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2")]
    orders = [alternate(examples, random.Random(seed)) for seed in range(30)]
    for order in orders:
        assert sorted(order, key=lambda one: one.text) == examples
        labels = [one.label for one in order]
        assert labels == 3 * labels[:3]
        assert set(labels[:3]) == {"a", "b", "c"}
    assert {order[0] for order in orders} == set(examples)  # every example can come first


def test_larger_class_takes_more_turns() -> None:
    examples = [Example(text, text[0]) for text in ("a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1", "b2")]
    orders = {"".join(one.label for one in alternate(examples, random.Random(seed))) for seed in range(30)}
    assert orders == {"baabaabaa", "abaabaaba", "aabaabaab"}


def test_spread() -> None:
    found = spread(np.array([[0.25, 0.75, 0.5], [1.0, 1.0, 1.0]]))
    assert {metric: values.tolist() for metric, values in found.items()} == {
        "best": [0.75, 1.0],
        "worst": [0.25, 1.0],
        "margin": [0.5, 0.0],
    }


def test_all_orders_have_the_same_demonstrations(tmp_path: Path) -> None:
    loaded = echo()
    trials = ShotOrder(length=350, orders=5).samples(find("trec", trec(tmp_path)), loaded).values()
    contexts = {(one.condition["arrangement"], one.condition["order"]): one.context for one in trials}
    assert len(contexts) == 10
    assert len({tuple(context) for context in contexts.values()}) == 10
    blocks = {key: loaded.tokenizer.decode(context).split(SEPARATOR)[:-1] for key, context in contexts.items()}
    assert len({tuple(sorted(some)) for some in blocks.values()}) == 1
    assert {one.condition["shots"] for one in trials} == {8}
    for (arrangement, _), some in blocks.items():
        labels = [block.split("Type:")[1] for block in some]
        assert labels.count(" human") == labels.count(" location") == 4
        assert all(here != there for here, there in pairwise(labels)) == (arrangement == "alternating")


def test_margins_of_models_with_and_without_order_effect(tmp_path: Path) -> None:
    report = run_probe(ShotOrder(length=600), echo(), steady(), output=tmp_path / "out", data=trec(tmp_path))
    assert [row["condition"]["arrangement"] for row in report.rows] == ["random", "alternating"]
    assert {row["condition"]["task"] for row in report.rows} == {"trec"}
    for row in report.rows:
        heeds, heeds_not = ({metric: value["mean"] for metric, value in one.items()} for one in row["models"])
        assert row["samples"] == 8
        assert (heeds["best"], heeds["worst"]) == (0.75, 0.25)  # with the larger class last, and the smaller one
        assert heeds["margin"] == 0.5
        assert len(row["orders"][0]) == 10
        assert set(row["orders"][0]) == {0.25, 0.75}
        assert heeds["accuracy"] == pytest.approx(sum(row["orders"][0]) / 10)
        assert heeds_not == {"accuracy": 0.75, "best": 0.75, "worst": 0.75, "margin": 0, "chance": 0}
        assert row["orders"][1] == [0.75] * 10
        assert row["difference"]["margin"]["mean"] == -0.5
        assert row["difference"]["worst"]["mean"] == 0.5
        for numbers in (*row["models"], row["difference"]):
            assert [metric for metric, value in numbers.items() if "low" in value] == ["accuracy"]
            assert numbers["accuracy"]["low"] <= numbers["accuracy"]["mean"] <= numbers["accuracy"]["high"]
        assert row["models"][1]["accuracy"]["low"] <= 0.5  # 6 of 8 questions are right
        assert row["models"][1]["accuracy"]["high"] == 1


def test_margin_by_chance_is_what_shuffled_answers_have() -> None:
    # each of two questions is right in one of two orders: both in the same, or one in each
    assert by_chance(np.array([[1.0, 0.0], [0.0, 1.0]]), seed=0) == pytest.approx(0.5, abs=0.05)
    assert by_chance(np.array([[1.0, 1.0], [0.0, 0.0]]), seed=0) == pytest.approx(0.5, abs=0.05)
    assert by_chance(np.array([[1.0, 0.0], [1.0, 0.0]]), seed=0) == 0


def test_tokenizers_that_fit_different_demonstrations_are_refused(tmp_path: Path) -> None:
    frugal = steady()
    frugal.tokenizer.add_tokens(["Question: question"])
    with pytest.raises(
        ValueError, match="Different numbers of demonstrations fit with the tokenizers of the two models"
    ):
        run_probe(ShotOrder(length=400), steady(), frugal, output=tmp_path / "out", data=trec(tmp_path))
