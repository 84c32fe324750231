"""The readers of the paper's seven tasks, on files made by hand."""

import bz2
import json
from pathlib import Path
from typing import Any

import pytest

from diffllama.evaluation.datasets.data import Source, find
from diffllama.evaluation.datasets.multiple_choice import TASKS, Item, dataset_name, read


HELLASWAG = "Rowing: A man sits. he\n1\nsings.\nrows.\nflies.\nmelts.\n"
SEA = {"query": "Question: Is the sea wet?", "choices": ["no", "yes"], "gold": 1}
JUG = {"context_options": ["The jug broke as the jug", "The jug broke as the wall"], "continuation": "fell.", "gold": 0}


def made(folder: Path, task: str, row: dict[str, Any]) -> Source:
    """Return a folder with a task of one row."""
    (folder / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    return Source(folder, built_in=False)


@pytest.mark.parametrize("task", ["arc_challenge", "arc_easy", "boolq", "piqa"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_question_is_answered(task: str, end: str, tmp_path: Path) -> None:
    source = made(tmp_path, task, SEA | {"query": SEA["query"] + end})
    context = "Question: Is the sea wet?\nAnswer:"
    assert read(task, source) == [Item(f"{task}:0", [context, context], [" no", " yes"], 1)]


def test_of_equal_answers_the_first_is_right(tmp_path: Path) -> None:
    """Equal answers are equally likely, and the first of equally likely answers counts as the model's."""
    source = made(tmp_path, "piqa", SEA | {"choices": ["no", "yes", "yes"], "gold": 2})
    assert read("piqa", source)[0].gold == 1


def test_openbook_qa_goes_on_with_its_sentence(tmp_path: Path) -> None:
    source = made(tmp_path, "openbook_qa", {"query": "The sea is", "choices": ["wet", "dry", "red"], "gold": 0})
    assert read("openbook_qa", source) == [Item("openbook_qa:0", ["The sea is"] * 3, [" wet", " dry", " red"], 0)]


def test_winogrande_goes_on_alike_with_two_sentences(tmp_path: Path) -> None:
    (item,) = read("winogrande", made(tmp_path, "winogrande", JUG))
    assert item == Item("winogrande:0", JUG["context_options"], [" fell.", " fell."], 0)


@pytest.mark.parametrize("name", ["hellaswag_val_full.txt", "hellaswag_val_full.txt.bz2"])
def test_six_lines_are_a_row_of_hellaswag(name: str, tmp_path: Path) -> None:
    content = (HELLASWAG + HELLASWAG.replace("1", "3")).encode()
    (tmp_path / name).write_bytes(bz2.compress(content) if name.endswith("bz2") else content)
    answers = [" sings.", " rows.", " flies.", " melts."]
    for source in (Source(tmp_path, built_in=False), Source(tmp_path / name, built_in=False)):
        assert read("hellaswag", source) == [
            Item(f"hellaswag:{number}", ["Rowing: A man sits. he"] * 4, answers, gold)
            for number, gold in enumerate((1, 3))
        ]


def test_other_line_separators_belong_to_a_row(tmp_path: Path) -> None:
    (tmp_path / "hellaswag_val_full.txt").write_text(HELLASWAG.replace("man", "man\u2028 or two"), encoding="utf-8")
    (item,) = read("hellaswag", Source(tmp_path, built_in=False))
    assert item.contexts[0] == "Rowing: A man\u2028 or two sits. he"


@pytest.mark.parametrize("task", TASKS)
def test_built_in_sample_is_enough_for_five_shots(task: str) -> None:
    items = read(task, find(dataset_name(task), None))
    assert len({item.id for item in items}) == len(items) >= 6
    assert len({item.gold for item in items}) > 1
    for item in items:
        assert len(set(item.contexts)) == (2 if task == "winogrande" else 1)
        assert len(item.contexts) == len(item.continuations)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("piqa", {"query": "Why?", "choices": ["so"]}, r"piqa\.jsonl has a row without `gold`"),
        ("piqa", SEA | {"gold": 2}, r"piqa\.jsonl: `gold` of piqa:0 must be from 0 to 1, got 2"),
        ("piqa", SEA | {"gold": "B"}, r"`gold` of piqa:0 must be from 0 to 1, got 'B'"),
        ("piqa", SEA | {"query": 7}, r"piqa\.jsonl has a row in which piqa:0 must be .* got 7"),
        ("piqa", SEA | {"choices": "no"}, "piqa:0 must have .* two or more answers.* got .* 'no'"),
        ("piqa", SEA | {"choices": ["no", ""]}, "piqa:0 must be .* got ''"),
        ("piqa", SEA | {"choices": []}, r"piqa:0 must have .* two or more answers.* and \[\]"),
        ("piqa", SEA | {"choices": ["no"], "gold": 0}, r"piqa:0 must .* two or more answers, got .* \['no'\]"),
        ("piqa", SEA | {"gold": 1.0}, "`gold` of piqa:0 must be from 0 to 1, got 1.0"),
        ("piqa", SEA | {"gold": True}, "`gold` of piqa:0 must be from 0 to 1, got True"),
        ("winogrande", JUG | {"context_options": []}, "winogrande:0 must have .* two or more answers"),
        ("winogrande", JUG | {"gold": 2}, "`gold` of winogrande:0 must be from 0 to 1, got 2"),
        ("winogrande", JUG | {"context_options": "The jug"}, "winogrande:0 must have .* two or more answers"),
    ],
)
def test_malformed_row_is_refused_by_name(task: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(task, made(tmp_path, task, row))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must have six lines per row, got 1 lines"),
        ("a\n1\nb", "must have six lines per row, got 3 lines"),
        (HELLASWAG.replace("1", "5"), "`gold` of hellaswag:0 must be from 0 to 3, got 5"),
        (HELLASWAG.replace("1", "B"), "`gold` of hellaswag:0 must be from 0 to 3, got 'B'"),
    ],
)
def test_malformed_hellaswag_file_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hellaswag_val_full.txt").write_text(content)
    with pytest.raises(ValueError, match=rf"hellaswag_val_full\.txt.*{message}"):
        read("hellaswag", Source(tmp_path, built_in=False))


def test_folder_without_the_task_is_refused(tmp_path: Path) -> None:
    for task in ("boolq", "hellaswag"):
        with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no {task}.*--data"):
            read(task, Source(tmp_path, built_in=False))
