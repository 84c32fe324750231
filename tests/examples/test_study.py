import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t
from transformers import AutoModelForCausalLM

from diffllama.hub_cards.checks import check
from examples import export_recall_model
from examples.study import recall
from examples.study.__main__ import main
from examples.study.arms import check_sizes
from examples.study.values import over_seeds


STUDY = Path(__file__).parents[2] / "examples/study"
TRACKS = sorted(STUDY.glob("*.yaml"))

WORDS = range(100, 160)
BRACKETS = (2, 3)


def track(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", TRACKS, ids=lambda path: path.stem)
def test_arms_of_a_track_have_as_many_parameters_as_its_transformer(path: Path) -> None:
    settings = track(path)
    models = {arm: settings["pretrain"]["model"] | fields for arm, fields in settings["arms"].items()}
    sizes = check_sizes(models)
    assert list(sizes) == ["Transformer", "V1", "V2", "V2 grouped"]
    assert max(sizes.values()) <= 1.01 * min(sizes.values())
    models["V2"] |= {"intermediate_size": settings["pretrain"]["model"]["intermediate_size"]}
    with pytest.raises(ValueError, match=r"V2 must have as many parameters .* Change its `intermediate_size`"):
        check_sizes(models)


def test_interval_is_students() -> None:
    numbers = over_seeds([0.2, 0.5, 0.9])
    error = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64).std().item() / 3**0.5
    low, high = t.interval(0.95, 2, loc=1.6 / 3, scale=error)
    assert (numbers["low"], numbers["mean"], numbers["high"]) == pytest.approx((low, 1.6 / 3, high))
    assert over_seeds([0.2]) == {"seeds": [0.2], "mean": 0.2}


TASK = recall.RecallTask(list(range(10, 90)), WORDS, BRACKETS)


def check_example(example: recall.Example, needles: int, noise: int) -> None:
    """Check that each query has one needle, with its value, and that the rest is consecutive text."""
    ids = example.ids
    assert example.context == noise + 4 * needles
    assert Counter(ids)[BRACKETS[0]] == Counter(ids)[BRACKETS[1]] == needles + len(example.answers)
    context = ids[: example.context]
    body = [token for token in context if token < 100 and token not in BRACKETS]
    assert body == list(range(body[0], body[0] + noise)) if noise else not body
    for answer, needle in zip(example.answers, example.needles, strict=True):
        assert ids[answer - 2 : answer + 2] == ids[needle - 2 : needle + 2]
        opened = [at for at, token in enumerate(context) if token == BRACKETS[0] and context[at + 1] == ids[answer - 1]]
        assert opened == [needle - 2]
    row = example.row
    assert row["input_ids"] == ids
    assert [at for at, label in enumerate(row["labels"]) if label != -100] == example.answers


@given(needles=st.integers(1, 12), noise=st.integers(0, 50), data=st.data())
def test_each_query_of_a_test_asks_for_another_needle(needles: int, noise: int, data: st.DataObject) -> None:
    queries = data.draw(st.integers(1, needles))
    length = noise + 4 * (needles + queries)
    example = TASK.test(random.Random(data.draw(st.integers(0, 99))), needles, queries, length)
    check_example(example, needles, noise)
    assert len(example.ids) == length
    assert example.first == dict(zip(example.needles, example.answers, strict=True))


@given(seed=st.integers(0, 999))
def test_queries_of_training_repeat_and_fill_the_sequence(seed: int) -> None:
    example = TASK.training(random.Random(seed), [2, 5], [11, 20], 96)
    needles, noise = next(
        (needles, noise)
        for needles in (2, 5)
        for noise in (12, 20)  # 11 and a rest of 1
        if example.context == 4 * needles + noise
    )
    check_example(example, needles, noise)
    assert len(example.ids) == 96
    assert len(example.answers) > len(example.first) == len(set(example.needles))
    for needle, answer in example.first.items():
        assert example.answers.index(answer) == example.needles.index(needle)


class Lookup:
    """A model that finds the value after the last token, in the same sequence."""

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        logits = torch.zeros(*ids.shape, 200)
        for row, tokens in enumerate(ids.tolist()):
            for at, token in enumerate(tokens):
                if tokens[at - 1] == BRACKETS[0]:
                    found = [place for place in range(1, at) if tokens[place - 1 : place + 1] == [BRACKETS[0], token]]
                    if found:
                        logits[row, at, tokens[found[0] + 1]] = 1
        return SimpleNamespace(logits=logits)


def test_accuracy_is_that_of_queries_without_repetition() -> None:
    draw = random.Random(0)
    examples = [TASK.test(draw, 6, 6, 80) for _ in range(5)]
    assert recall.accuracy(recall.correct(Lookup(), examples)) == 1
    assert recall.accuracy(recall.correct(Lookup(), [recall.shuffled(example, draw) for example in examples])) == 1
    examples[0].ids[examples[0].needles[1]] = 5  # the second query's needle has another value
    assert recall.correct(Lookup(), examples)[0] == [True, False, True, True, True, True]
    assert recall.accuracy(recall.correct(Lookup(), examples)) == 29 / 30
    repeated = TASK.example(draw, 3, [2, 2, 0, 2], 10)
    assert recall.correct(Lookup(), [repeated]) == [[True, True]]


def test_shuffled_needles_keep_the_places() -> None:
    example = TASK.example(random.Random(1), 8, [0, 1, 2, 3, 4, 5, 6, 7, 3], 30)
    other = recall.shuffled(example, random.Random(2))
    assert sorted(other.first) == sorted(example.first)
    assert other.needles != example.needles
    assert other.ids[example.context :] == example.ids[example.context :]
    inside = {at for needle in example.needles for at in range(needle - 2, needle + 2)}
    assert all(one == two for at, (one, two) in enumerate(zip(example.ids, other.ids, strict=True)) if at not in inside)
    for answer, needle in zip(other.answers, other.needles, strict=True):
        assert other.ids[needle - 2 : needle + 2] == other.ids[answer - 2 : answer + 2]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten documents of made-up words."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=4)) for _ in range(150)]
    for number in range(10):
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(words, k=2000)))
    return folder


SMALL = {"max_steps": 4, "warmup_steps": 1, "logging_steps": 2, "eval_steps": 2, "save_steps": 2}


def small_track(name: str) -> dict[str, Any]:
    """Return a track with small models and few steps, of one learning rate and two arms."""
    settings = track(STUDY / f"{name}.yaml")
    settings |= {"seeds": [0, 1], "learning_rates": [1e-3], "held_out": 4}
    settings["arms"] = {"V1": {"diff_variant": "v1", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}}
    pretrain = settings["pretrain"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 512}
    pretrain["model"] |= sizes | {"max_position_embeddings": 256}
    pretrain |= {"sequence_length": 64, "tokens_per_step": 256}
    pretrain["training"] |= SMALL | {"per_device_train_batch_size": 4, "use_cpu": True}
    if name == "recall":
        tests = {"accuracy by length": [[4, 4, 64], [4, 4, 128]]}
        tests |= {"accuracy by needles": [[2, 2, 64]], "accuracy by needles, 4 asked": [[6, 4, 64]]}
        settings["recall"] |= {"words": 60, "needles": [2, 4], "noise": [16], "tests": tests, "test_sequences": 4}
        settings["recall"] |= {"outlier_sequences": 2, "orders": 2}
    else:
        settings["language"]["probes"] = {
            "context": {"length": 128, "texts": 1},
            "recall": {"length": 64, "texts": 1},
            "outliers": {"length": 64, "tokens": 128},
        }
    return settings


def study(settings: dict[str, Any], folder: Path, texts: Path) -> dict[str, Any]:
    """Run the study and return its results."""
    main(write(settings, folder), folder, str(texts), jobs=2)
    return json.loads((folder / "results.json").read_text())


def write(settings: dict[str, Any], folder: Path) -> Path:
    """Write the settings into a file beside the folder."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def recall_study(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """The folder of a study of recall."""
    folder = tmp_path_factory.mktemp("studies") / "whole"
    study(small_track("recall"), folder, texts)
    return folder


@pytest.mark.slow
def test_killed_study_continues_in_another_folder(tmp_path: Path, texts: Path, recall_study: Path) -> None:
    settings, whole = small_track("recall"), json.loads((recall_study / "results.json").read_text())
    assert whole["parameters"].keys() == {"Transformer", "V1"}
    accuracy = next(row for row in whole["rows"] if row["measure"] == "accuracy as trained")
    assert len(accuracy["arms"]["V1"]["seeds"]) == 2
    assert [tokens for tokens, _ in whole["curves"]["eval_loss"]["V1"]["0"]] == [512, 1024]
    assert "Transformer" not in whole["curves"]["diff_lambda"]

    words = ["-m", "examples.study", write(settings, tmp_path / "killed"), "--text", texts, "--folder"]
    with subprocess.Popen([sys.executable, *words, tmp_path / "killed"], cwd=STUDY.parents[1]) as process:
        while not list(tmp_path.glob("killed/runs/*/*/*/*/checkpoint-2/trainer_state.json")):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    assert not (tmp_path / "killed/results.json").exists()
    (tmp_path / "killed").rename(tmp_path / "moved")
    moved = study(settings, tmp_path / "moved", texts)
    assert moved == whole | {"versions": moved["versions"]}
    assert {file.name for file in (tmp_path / "moved").glob("*.*")} >= {"tables.md", "curves.png", "results.png"}
    assert "| Transformer |" in (tmp_path / "moved/tables.md").read_text()


@pytest.mark.slow
def test_recall_model_is_exported_with_its_accuracy(tmp_path: Path, recall_study: Path) -> None:
    export_recall_model.main(str(recall_study), str(tmp_path / "model"))
    assert check(tmp_path / "model") == []
    card = (tmp_path / "model/README.md").read_text()
    assert card.index("# model") < card.index("## Task") < card.index("## Training")
    assert "with 2 to\n4 needles" in card
    assert re.search(r"it predicts\n\d+\.\d% of the values", card)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


@pytest.mark.slow
def test_language_study_runs_the_probes(tmp_path: Path, texts: Path) -> None:
    results = study(small_track("gpu") | {"seeds": [0]}, tmp_path / "study", texts)
    measured = {row["measure"] for row in results["rows"]}
    assert measured == {"held-out loss", "context", "recall", "outliers"}


def test_study_with_other_settings_is_refused(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = small_track("recall")
    fixed = {name: value for name, value in settings.items() if name != "seeds"}
    (tmp_path / "study").mkdir()
    (tmp_path / "study/study.json").write_text(json.dumps(fixed | {"held_out": 8}))
    with pytest.raises(typer.Exit):
        main(write(settings, tmp_path / "study"), tmp_path / "study", str(texts))
    assert "has other held_out. Restore them, or name another --folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no study yet. Name a folder with text: --text FOLDER."),
        ("few", "must have at least 10 documents (files), found 1 in"),
        ("missing", "`data.files` must name files with text"),
    ],
)
def test_missing_text_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few/a.txt").write_text("one document")
    with pytest.raises(typer.Exit):
        main(write(small_track("recall"), tmp_path / "study"), tmp_path / "study", text and str(tmp_path / text))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": []}, "seeds"),
        ({"task": "translation"}, "Input should be 'recall' or 'language'"),
        ({"steps": 3}, "steps"),
    ],
)
def test_invalid_settings_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(typer.Exit):
        main(write(small_track("recall") | change, tmp_path / "study"), tmp_path / "study", "texts")
    assert message in capsys.readouterr().err
    assert not (tmp_path / "study").exists()
