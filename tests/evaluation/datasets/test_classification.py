"""Published classification data, and answers constrained to classes, with a shared context and without."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from diffllama.evaluation.datasets import classification
from diffllama.evaluation.datasets.classification import Example, Prompt, classify, option_ids, read_examples
from diffllama.evaluation.datasets.data import Source, find
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.settings import ClassificationTask
from support.rule_based_lm import RuleBasedLM, byte_tokenizer, rule_based_lm
from support.tiny_loaded_models import KINDS, tiny_loaded_model
from support.tiny_models import EVERY_FEATURE, tiny_model


def data(folder: Path, **files: str) -> Source:
    """A folder with these files in Latin-1: `train_txt` is train.txt."""
    for name, content in files.items():
        *stem, suffix = name.split("_")
        (folder / f"{'_'.join(stem)}.{suffix}").write_bytes(content.encode("latin-1"))
    return Source(folder, built_in=False)


@pytest.mark.parametrize("task", get_args(ClassificationTask))
def test_built_in_samples(task: ClassificationTask) -> None:
    train, test = read_examples(task, find(task.removesuffix("-fine"), None))
    assert len(train) >= 30
    assert {one.label for one in test} <= {one.label for one in train}
    assert len({one.label for one in train}) >= (20 if task == "trec-fine" else 6)


def test_trec(tmp_path: Path) -> None:
    # Latin-1's next-line character ends no line; one question is also in the test
    train = "ENTY:dismed What  is\x85 caf\xe9 ?\r\nLOC:city Where ?\n\nLOC:mount Which hill ?\nLOC:city Who ?\n"
    source = data(tmp_path, train_txt=train, test_txt="LOC:city Who ?\n")
    coarse = [("What is caf\xe9 ?", "entity"), ("Where ?", "location"), ("Which hill ?", "location")]
    assert read_examples("trec", source) == (
        [Example(*one) for one in coarse],
        [Example("Who ?", "location")],
    )
    train_examples, _ = read_examples("trec-fine", source)
    assert [one.label for one in train_examples] == ["entity disease", "location city", "location mountain"]


def test_banking(tmp_path: Path) -> None:
    train = 'text,category\n"\nMy card, please\n\n",get_card?\nWhere?,a\n'
    source = data(tmp_path, train_csv=train, test_csv="text,category\nWhy?,a\n")
    assert read_examples("banking77", source) == (
        [Example("My card, please", "get card?"), Example("Where?", "a")],
        [Example("Why?", "a")],
    )


def test_clinc_without_what_is_out_of_scope(tmp_path: Path) -> None:
    content = {"oos_train": [["x", "oos"]], "val": [["v", "b"]], "train": [["t", "a_b"]], "test": [["u", "a_b"]]}
    source = data(tmp_path, data_full_json=json.dumps(content))
    expected = [Example("t", "a b")], [Example("u", "a b")]
    assert read_examples("clinc150", source) == expected
    assert read_examples("clinc150", Source(tmp_path / "data_full.json", built_in=False)) == expected


@pytest.mark.parametrize("task", get_args(ClassificationTask))
def test_byte_order_mark_is_skipped(task: ClassificationTask, tmp_path: Path) -> None:
    built_in = find(task.removesuffix("-fine"), None)
    for file in built_in.path.iterdir():
        (tmp_path / file.name).write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_examples(task, Source(tmp_path, built_in=False)) == read_examples(task, built_in)


GOOD = "LOC:city Where ?\n"


CSV = {"test_csv": "text,category\nWhy?,a\n"}


@pytest.mark.parametrize(
    ("task", "files", "message"),
    [
        ("trec", {"train_txt": GOOD + "Who ?\n"}, r"train.txt, line 2 must be `COARSE:fine question`.* got `Who \?`"),
        (
            "trec",
            {"test_txt": "PLACE:x Who ?"},
            r"test.txt, line 1 must .*COARSE one of ABBR.* got `PLACE:x Who \?`",
        ),
        ("trec", {"test_txt": "\n"}, "has no test examples"),
        ("trec", {"test_txt": "HUM:ind Who ?\n"}, "no training examples of the test classes human"),
        ("trec", {"test_txt": GOOD}, "no training examples of the test classes location"),
        ("banking77", CSV | {"train_csv": "query,intent\na,b\n"}, "without `text`; its fields are query, intent"),
        ("banking77", CSV | {"train_csv": "text,category\n,b\n"}, "train.csv, row 1, has no text"),
        ("banking77", CSV | {"train_csv": "text,category\na,b\nc,\n"}, "train.csv, row 2, has no class"),
        ("clinc150", {"data_full_json": "{"}, "data_full.json is not JSON"),
        ("clinc150", {"data_full_json": "[]"}, "must be a JSON object with lists `train` and `test`"),
        ("clinc150", {"data_full_json": '{"train": [["a", "b"]]}'}, "must be a JSON object with lists `train` and `te"),
        (
            "clinc150",
            {"data_full_json": '{"train": [["a", "b"], ["a"]]}'},
            r"row 2 of `train` must be \[text, intent",
        ),
        ("clinc150", {"data_full_json": '{"train": "ab"}'}, "must be a JSON object with lists `train` and `test`"),
        ("clinc150", {"data_full_json": '{"train": [["a", 1]]}'}, r"row 1 of `train` must be .* got \[\"a\", 1\]"),
        ("clinc150", {"data_full_json": '{"train": [["a", ""]]}'}, "row 1 of `train`, has no class"),
    ],
)
def test_malformed_files_are_refused(
    task: ClassificationTask, files: dict[str, str], message: str, tmp_path: Path
) -> None:
    source = data(tmp_path, **{"train_txt": GOOD, "test_txt": GOOD} | files)
    with pytest.raises(ValueError, match=message):
        read_examples(task, source)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no train.txt or train_5500.label.*--data"):
        read_examples("trec", Source(tmp_path, built_in=False))
    data(tmp_path, train_txt=GOOD, test_txt=GOOD)
    with pytest.raises(ValueError, match=r"is a file. Name the folder that has train.txt and test.txt with --data"):
        read_examples("trec", Source(tmp_path / "train.txt", built_in=False))


def answered(loaded: LoadedModel, questions: list[str], labels: list[str], context: str = "x") -> list[str]:
    options = option_ids(loaded, ":", {label: f" {label}\n" for label in labels})
    shared = loaded.encode(context)
    prompts = {question: Prompt(shared, loaded.encode(f"{question}:"), options) for question in questions}
    answers = dict(classify(loaded, prompts))
    return [answers[question] for question in questions]


def test_answers_are_the_models_if_they_are_classes() -> None:
    loaded = rule_based_lm(lambda text: f" {text[-5:-1]}\n", after=":")
    labels = ["time", "timer", "time ta", "date"]
    long_answers = rule_based_lm(lambda text: " " + text[1:-1] + "\n", after=":")
    assert answered(loaded, ["time", "date"], labels) == ["time", "date"]
    assert answered(long_answers, ["timer", "time", "time ta", "date"], labels) == ["timer", "time", "time ta", "date"]


def test_impossible_preferences_are_forced_to_a_class() -> None:
    # z is always likeliest, then later letters before earlier ones: of tar, tea and ale it chooses tea
    alphabet = byte_tokenizer()
    logits = {alphabet.encode(letter)[0]: float(ord(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"}
    loaded = LoadedModel(name="z", model=RuleBasedLM(lambda _: logits, len(alphabet)).eval(), tokenizer=alphabet)
    assert answered(loaded, ["what", "why not"], ["tar", "ale", "tea"]) == ["tea", "tea"]


def test_nan_scores_make_no_class() -> None:
    tokenizer = byte_tokenizer()
    model = RuleBasedLM(lambda _: dict.fromkeys(range(257), float("nan")), len(tokenizer)).eval()
    with pytest.raises(ValueError, match=r"scores are NaN in float32\. Try another --dtype"):
        answered(LoadedModel(name="broken", model=model, tokenizer=tokenizer), ["what"], ["time", "date"])


def test_one_class_needs_no_model() -> None:
    loaded = LoadedModel(name="none", model=tiny_loaded_model("v1").model, tokenizer=byte_tokenizer())
    assert answered(loaded, ["a", "b"], ["only"]) == ["only", "only"]


def test_classes_with_a_common_token_prefix_are_refused() -> None:
    loaded = rule_based_lm(lambda _: "", "")
    with pytest.raises(ValueError, match="must not encode class time as the beginning of timer"):
        option_ids(loaded, ":", {"date": "date", "timer": "timer", "time": "time"})


@torch.inference_mode()
def whole(loaded: LoadedModel, prompt: Prompt) -> str:
    """Decode greedily, constrained to the options, without a KV cache."""
    said: list[int] = []
    while True:
        left = {label: ids for label, ids in prompt.options.items() if ids[: len(said)] == said}
        if len(left) == 1:
            return next(iter(left))
        logits = loaded.model(loaded.tensor(prompt.context + prompt.question + said), use_cache=False).logits[0, -1]
        said.append(max({ids[len(said)] for ids in left.values()}, key=lambda token: logits[token].item()))


def loaded_models() -> list[LoadedModel]:
    windows = tiny_model("v2", attn_implementation="sdpa", vocab_size=257, **EVERY_FEATURE)
    named = LoadedModel(name="windows", model=windows, tokenizer=byte_tokenizer())
    return [*map(tiny_loaded_model, KINDS), named]


@pytest.mark.parametrize("loaded", loaded_models(), ids=lambda loaded: loaded.name)
def test_shared_context_changes_no_answer(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "CHUNK", 16)
    monkeypatch.setattr(classification, "BATCH_TOKENS", 200)
    labels = [first + second for first in "abcdefghijklmnopqrstuvwxyz" for second in ("", "a", "e")]
    options = option_ids(loaded, ":", {label: f" {label}\n" for label in labels})
    first = loaded.encode("a sea: tide\nan hour: time\n")
    contexts = [first, first + loaded.encode("a day: date\n"), loaded.encode("a friend: mate\na point: east\n")]
    questions = ["bread", "a longer question", "cloud", "wheat", "another question", "rain", "x"]
    prompts = [Prompt(context, loaded.encode(f"{one}:"), options) for context in contexts for one in questions]
    forwards: list[tuple[int, ...]] = []
    handle = loaded.model.register_forward_pre_hook(lambda _, inputs: forwards.append(tuple(inputs[0].shape)))
    found = dict(classify(loaded, {str(index): prompt for index, prompt in enumerate(prompts)}))
    handle.remove()
    expected = [whole(loaded, prompt) for prompt in prompts]
    assert [found[str(index)] for index in range(len(prompts))] == expected
    assert len(set(expected)) > 2  # several classes, so that a wrong context would be noticed
    contexts_computed = [shape for shape in forwards if shape[1] in (16, 10, 12, 13)]  # no question is so long
    assert contexts_computed == [(1, 16), (1, 10), (1, 12), (1, 16), (1, 13)]
    assert max(rows for rows, _ in forwards) == 3  # questions of equal length are answered together
