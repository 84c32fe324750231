"""`diffllama eval` and its tasks, with models whose answers are known or equal."""

import inspect
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from huggingface_hub import ModelCard
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from diffllama.cli import main
from diffllama.conversion.engine import convert
from diffllama.evaluation.datasets.data import SAMPLES, find
from diffllama.evaluation.datasets.multiple_choice import TASKS as NAMES
from diffllama.evaluation.datasets.multiple_choice import dataset_name, read
from diffllama.evaluation.probes.needles import Needles
from diffllama.evaluation.tasks.command import TASKS
from diffllama.evaluation.tasks.harness import accuracy, accuracy_per_character, multiple_choice, needles
from support import subprocess_runner
from support.llama_checkpoints import llama
from support.rule_based_lm import byte_tokenizer, rule_based_lm


@pytest.fixture(scope="module", autouse=True)
def small_lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give lm-eval only one folder of its own tasks and no list of packages, which both take seconds.

    The environment's data are ignored.
    """
    folder = tmp_path_factory.mktemp("lm_eval")
    shutil.copytree(Path(lm_eval.tasks.__file__).parent / "hellaswag", folder / "hellaswag")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.tasks.manager.__file__", str(folder / "manager.py"))
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
        patch.delenv("DIFFLLAMA_DATA", raising=False)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, `llama`, and its exact conversion, `diff`."""
    folder = tmp_path_factory.mktemp("models")
    llama(folder / "llama", vocab_size=257, max_position_embeddings=4096)
    byte_tokenizer().save_pretrained(folder / "llama")
    convert(folder / "llama", folder / "diff", source="llama")
    return folder


def manager(**metadata: Any) -> TaskManager:
    return TaskManager(include_path=str(TASKS), metadata=metadata)


@pytest.fixture(scope="module")
def original(models: Path) -> dict[int, dict[str, Any]]:
    """lm-eval's results of the Llama on two items of each task, with no examples and with two."""
    model = HFLM(str(models / "llama"), batch_size=8, device="cpu")
    return {
        shots: simple_evaluate(
            model=model,
            tasks=["diffllama_paper"],
            num_fewshot=shots,
            limit=2,
            task_manager=manager(),
            bootstrap_iters=0,
        )
        for shots in (0, 2)
    }


def scores(folder: str, groups: list[list[tuple[str, str]]], **arguments: Any) -> tuple[str, str, list[list[float]]]:
    """Return the model's class, and lm-eval's log-likelihoods of groups of (prompt, answer)."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(folder, batch_size=8, device="cpu", **arguments)
    likelihoods = [
        model.loglikelihood([Instance("loglikelihood", {}, tuple(pair), at) for at, pair in enumerate(pairs)])
        for pairs in groups
    ]
    kind = type(model.model)
    return kind.__module__, kind.__name__, [[score for score, _ in group] for group in likelihoods]


@pytest.mark.slow
def test_llama_conversion_and_remote_code_have_equal_log_likelihoods(
    models: Path, original: dict[int, dict[str, Any]]
) -> None:
    groups = [[sample for items in found["samples"].values() for sample in items] for found in original.values()]
    pairs = [[pair for sample in samples for pair in sample["arguments"]] for samples in groups]
    known = [[score for sample in samples for score, _ in sample["filtered_resps"]] for samples in groups]
    values = [value for group in known for value in group]
    assert [len(samples) for samples in groups] == [14, 14]
    assert all(math.isfinite(value) and value < 0 for value in values)
    assert len(set(values)) > 0.9 * len(values)

    diff = str(models / "diff")
    code = (
        f"from typing import Any\n{inspect.getsource(scores)}\n"
        f"facts['scores'] = scores({diff!r}, {pairs!r}, trust_remote_code=True)"
    )
    package = scores(diff, pairs)
    assert package == ("diffllama.modeling_diff.modeling_diffllama", "DifferentialLlamaForCausalLM", known)
    module, *remote = subprocess_runner.facts(code, {"HF_MODULES_CACHE": str(models / "modules")})["scores"]
    assert module.startswith("transformers_modules.")
    assert tuple(remote) == package[1:]


@pytest.mark.parametrize("task", NAMES)
def test_examples_are_other_items_answered(task: str, original: dict[int, dict[str, Any]]) -> None:
    items = read(task, find(dataset_name(task), None))
    solved = [item.contexts[item.gold] + item.continuations[item.gold] for item in items]
    for shots in (0, 2):
        samples = original[shots]["samples"][f"diffllama_{task}"]
        assert [sample["doc_id"] for sample in samples] == [0, 1]
        for item, own, sample in zip(items, solved, samples, strict=False):
            pairs = zip(item.contexts, item.continuations, strict=True)
            for pair, (prompt, answer) in zip(pairs, sample["arguments"], strict=True):
                *examples, question = prompt.split("\n\n")
                assert (question, answer) == pair
                assert len(set(examples)) == len(examples) == shots
                assert set(examples) <= set(solved) - {own}


def test_group_is_the_mean_of_seven_accuracies(original: dict[int, dict[str, Any]]) -> None:
    for shots in (0, 2):
        known = []
        for task in NAMES:
            items = read(task, find(dataset_name(task), None))[:2]
            right = 0
            for item, sample in zip(items, original[shots]["samples"][f"diffllama_{task}"], strict=True):
                scores = [likelihood for likelihood, _ in sample["filtered_resps"]]
                if task == "hellaswag":
                    scores = [score / len(text[1:]) for score, text in zip(scores, item.continuations, strict=True)]
                right += scores.index(max(scores)) == item.gold
            known.append(right / len(items))
            assert original[shots]["results"][f"diffllama_{task}"]["accuracy,none"] == pytest.approx(known[-1])
        assert original[shots]["results"]["diffllama_paper"]["accuracy,none"] == pytest.approx(sum(known) / 7)


def test_accuracy_is_of_the_most_likely_answer() -> None:
    doc = {"continuations": ["abcd", "e"], "gold": 0}
    results = [(-8.0, False), (-4.0, True)]  # -2 and -4 per character
    assert accuracy(doc, results) == {"accuracy": 0.0}
    assert accuracy_per_character(doc, results) == {"accuracy": 1.0}
    assert accuracy(doc | {"gold": 1}, results) == {"accuracy": 1.0}
    assert accuracy_per_character(doc | {"gold": 1}, results) == {"accuracy": 0.0}


def test_nan_scores_are_refused() -> None:
    doc = {"continuations": ["abcd", "e"], "gold": 0}
    for metric in (accuracy, accuracy_per_character):
        for results in ([(math.nan, False)] * 2, [(-4.0, True), (math.nan, False)]):
            with pytest.raises(ValueError, match=r"scores are NaN.* --model_args dtype="):
                metric(doc, results)
        assert metric(doc, [(-4.0, True), (-math.inf, False)]) == {"accuracy": 1.0}


def test_needles_are_those_of_the_probe_and_counted_alike(models: Path) -> None:
    def answer(question: str) -> str:
        city = re.findall(r"The magic numbers? of (\w+)", question)[-1]  # the first requested city
        (number,) = re.findall(rf"magic number of {city} is (\d+)\.", question)
        return f" {number}."

    loaded = rule_based_lm(answer, after=" are")
    settings = {"length": [700], "depth": [0.25, 1.0], "samples_per_condition": 2, "seed": 3}
    samples = Needles(needles=["2_of_2"], **settings).samples(find("novels", None), loaded)
    model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer)
    metadata = settings | {"pretrained": str(models / "llama"), "length": 700}
    task = "diffllama_needles_2_of_2"
    found = simple_evaluate(model=model, tasks=[task], task_manager=manager(**metadata), bootstrap_iters=0)
    assert found["results"][task]["accuracy,none"] == 0.5
    prompts = [sample["arguments"][0][0] for sample in found["samples"][task]]
    assert prompts == [sample.prompt.text for sample in samples.values()]


def test_group_of_needles_has_every_pair_of_the_probe(models: Path) -> None:
    settings = {"pretrained": str(models / "llama"), "length": 700, "depth": 0.5, "samples_per_condition": 1}
    tasks = manager(**settings).load(["diffllama_needles"])["tasks"].values()
    assert [task.task_docs[0]["needles"] for task in tasks] == Needles().needles


def test_needles_need_a_tokenizer_and_room(models: Path) -> None:
    with pytest.raises(ValueError, match="Name a tokenizer with --metadata tokenizer=DIR"):
        needles("1_of_1")
    with pytest.raises(
        ValueError, match="--metadata length=TOKENS must hold the question and a sentence of text, got 20"
    ):
        needles("1_of_1", pretrained=str(models / "llama"), length=20)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(
            ("depth", value, "a number or a list of them, from 0 to 1")
            for value in (7, -1, [], [0.5, 2], "a", math.nan)
        ),
        *(
            ("length", value, "a whole number or a list of them, from 1")
            for value in (0, "abc", 7.5, [700, "abc"], True)
        ),
        *(("samples_per_condition", value, "a whole number, from 1") for value in (0, "two", [2])),
        *(("seed", value, "a whole number, from 0 to 4294967295") for value in (-1, "a", None)),
        ("data", 1, "a path, such as ./novels"),
    ],
)
def test_wrong_settings_of_needles_are_refused(name: str, value: Any, message: str, models: Path) -> None:
    settings = {"pretrained": str(models / "llama"), "length": 700, "samples_per_condition": 1} | {name: value}
    with pytest.raises(ValueError, match=f"^--metadata {name} must be {message}, got {re.escape(repr(value))}"):
        needles("1_of_1", **settings)


def test_data_of_option_environment_or_sample_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(**metadata: Any) -> str:
        return multiple_choice("piqa", **metadata)["test"][0]["contexts"][0]

    for name in ("a", "b"):
        (tmp_path / name / "multiple_choice").mkdir(parents=True)
        row = {"query": f"Question: {name}?", "choices": ["no", "yes"], "gold": 0}
        (tmp_path / name / "multiple_choice" / "piqa.jsonl").write_text(json.dumps(row))
    assert first().startswith("Question: To keep a door from creaking")
    monkeypatch.setenv("DIFFLLAMA_DATA", str(tmp_path / "a"))
    assert first(pretrained="x", version=1.0) == "Question: a?\nAnswer:"
    assert first(data=str(tmp_path / "b")) == "Question: b?\nAnswer:"
    with pytest.raises(ValueError, match=r"--metadata data must be a path, such as \./novels, got 1"):
        first(data=1)
    with pytest.raises(ValueError, match=r"--metadata must not have data_source.* got 'mine'"):
        first(data_source="mine")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no piqa\.jsonl.* with --metadata data=PATH"):
        first(data=str(tmp_path))


def call(*arguments: object) -> int:
    """Run the command as the shell would, in this process. Returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["diffllama", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code or 0


def test_results_of_the_command_line_feed_the_card(models: Path, tmp_path: Path) -> None:
    data = shutil.copytree(SAMPLES, tmp_path / "data")  # as a user's own data
    diff = models / "diff"
    options = ("--model_args", f"pretrained={diff}", "--tasks", "diffllama_paper", "--num_fewshot=1")
    options = (*options, "--metadata", f"data={data}", "--device=cpu", "-o", tmp_path, "--log_samples")
    assert call("eval", "run", *options) == 0
    assert len(list(tmp_path.rglob("samples_diffllama_piqa_*.jsonl"))) == 1
    (file,) = tmp_path.rglob("results_*.json")
    record = json.loads(file.read_text())
    results = record["results"]
    assert set(results) == {"diffllama_paper", *(f"diffllama_{name}" for name in NAMES)}
    assert [task["metadata"]["data_source"] for task in record["configs"].values()] == [{"built_in": False}] * 7

    assert call("card", diff, "--results", tmp_path) == 0
    card = ModelCard.load(diff / "README.md").data.eval_results
    assert {result.dataset_name: result.metric_value for result in card} == {
        task: numbers["accuracy,none"] for task, numbers in results.items()
    }
    assert {(result.metric_type, result.metric_name) for result in card} == {("accuracy", "accuracy, 1-shot")}


def test_results_say_that_the_data_are_samples_and_limited(models: Path, tmp_path: Path) -> None:
    tasks = "diffllama_piqa,diffllama_needles_1_of_1"
    options = ("--model_args", f"pretrained={models / 'llama'}", "--tasks", tasks, "--limit", 1, "-o", tmp_path)
    metadata = ("--metadata", "length=300", "depth=0", "samples_per_condition=2")
    assert call("eval", "run", *options, *metadata) == 0
    (file,) = tmp_path.rglob("results_*.json")
    record = json.loads(file.read_text())
    assert [task["metadata"]["data_source"] for task in record["configs"].values()] == [{"built_in": True}] * 2
    assert record["n-samples"]["diffllama_piqa"] == {"original": 7, "effective": 1}


MINE = {"task": "mine", "include": str(TASKS / "piqa.yaml")}


@pytest.mark.parametrize("place", ["option", "configuration"])
def test_tasks_of_the_user_are_found_beside_ours(
    place: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(json.dumps(MINE))  # JSON is YAML
    (tmp_path / "config.yaml").write_text(json.dumps({"include_path": str(tmp_path / "tasks")}))
    include = ("--include_path", tmp_path / "tasks") if place == "option" else ("--config", tmp_path / "config.yaml")
    options = ("--tasks", "mine,diffllama_boolq", "--model_args", f"pretrained={models / 'llama'}", "--limit", 1)
    assert call("eval", *options, *include) == 0
    out = capsys.readouterr().out
    assert "|mine " in out
    assert "|diffllama_boolq" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--help"], 0, "usage: lm-eval [-h] COMMAND"),
        (["run", "--help"], 0, "usage: lm-eval run --model <model>"),
        ([], 0, "usage: lm-eval [-h] COMMAND"),
        (["ls", "groups"], 0, "diffllama_paper"),
        (["run", "--nonesuch", "x"], 2, "lm-eval: error: unrecognized arguments: --nonesuch x"),
        (["validate", "--tasks", "diffllama_paper,nonesuch"], 1, "Tasks not found: nonesuch"),
        (["validate", "-t", "hellaswag,diffllama_paper,diffllama_needles"], 0, "All tasks found and valid"),
        (["run", "--tasks", "nonesuch"], 1, "Error: ValueError: Tasks not found: nonesuch"),
        (["run", "--config", "nonesuch.yaml"], 1, "Error: FileNotFoundError: Config file not found: "),
    ],
)
def test_command_line_is_that_of_lm_eval(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("eval", *arguments) == status
    out, err = capsys.readouterr()
    assert message in out + err
    assert "Traceback" not in err


def test_missing_data_is_one_line_of_error(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tasks", "diffllama_piqa", "--model_args", f"pretrained={models / 'llama'}", "--metadata", "data=/nil")
    assert call("eval", "run", *options) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("Error: FileNotFoundError: /nil does not exist.")
    assert error.endswith("with --metadata data=PATH.")


def test_eval_without_extra_names_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "diffllama.evaluation.tasks.command")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert call("eval", "--help") == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("Error: ModuleNotFoundError: ")
    assert error.endswith("In a clone of diffllama: pip install '.[eval]'")
