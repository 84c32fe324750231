# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The paper's seven multiple-choice tasks, read from local files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from diffllama.evaluation.datasets.data import Source, field, read_rows, read_text, text_field
from diffllama.evaluation.settings import MultipleChoiceTask


TASKS: tuple[MultipleChoiceTask, ...] = get_args(MultipleChoiceTask)
"""The names of the tasks, which are also those of their files."""


@dataclass(frozen=True)
class Item:
    """A question and its answers. A model chooses the answer with the highest likelihood after its context.

    Args:
        id: unique within its task.
        contexts: the text before each answer: the question, once per answer. In WinoGrande, the beginning of the
            sentence with each of the names filled in.
        continuations: the answers, each with a space before it. In WinoGrande, the end of the sentence, twice.
        gold: index of the right answer.
    """

    id: str
    contexts: list[str]
    continuations: list[str]
    gold: int


def dataset_name(task: str) -> str:
    """Return the name of a task's data in `find`."""
    return "hellaswag" if task == "hellaswag" else "multiple_choice"


def read(task: str, source: Source) -> list[Item]:
    """Read the items of a task.

    The prompts are the LM Evaluation Harness's with two differences, which the files have: a passage of BoolQ begins
    with "Passage: ", and the last words of HellaSwag's contexts are not capitalized.

    Args:
        task: one of `TASKS`.
        source: a folder with `TASK.jsonl` or, for HellaSwag, `hellaswag_val_full.txt.bz2`; or such a file. A row of the
            former has `query`, `choices` and `gold`; in WinoGrande `context_options`, `continuation` and `gold`. A row
            of the latter is six lines: context, number of the right ending, and four endings.

    Raises:
        FileNotFoundError: the folder has no such file.
        ValueError: the file has another format.
    """
    if task == "hellaswag":
        return _hellaswag(source.file("hellaswag_val_full.txt.bz2", "hellaswag_val_full.txt"))
    file = source.file(f"{task}.jsonl")
    items = []
    for number, row in enumerate(read_rows(file)):
        if task == "winogrande":
            contexts, answers = field(row, "context_options", file), [field(row, "continuation", file)]
        else:
            contexts, answers = [field(row, "query", file)], field(row, "choices", file)
        ask = "" if task in ("openbook_qa", "winogrande") else "\nAnswer:"  # those two complete a sentence
        items.append(_item(f"{task}:{number}", contexts, answers, field(row, "gold", file), file, ask))
    return items


def _hellaswag(file: Path) -> list[Item]:
    lines = read_text(file).rstrip("\n").split("\n")
    if len(lines) % 6:
        raise ValueError(f"{file} must have six lines per row, got {len(lines):,} lines.")
    items = []
    for start in range(0, len(lines), 6):
        context, gold, *endings = lines[start : start + 6]
        number = int(gold) if gold.isdecimal() else gold
        items.append(_item(f"hellaswag:{start // 6}", [context], endings, number, file))
    return items


def _item(name: str, contexts: Any, answers: Any, gold: Any, file: Path, ask: str = "") -> Item:
    """Make an item of one context with several answers, or of several contexts with one answer."""
    lists = isinstance(contexts, list) and isinstance(answers, list)
    choices = max(len(contexts), len(answers)) if lists and contexts and answers else 0
    if choices < 2:
        raise ValueError(
            f"{file}: {name} must have a question and a list of two or more answers, got {contexts!r} and {answers!r}."
        )
    for text in (*contexts, *answers):
        text_field({name: text}, name, file)
    if type(gold) is not int or gold not in range(choices):  # 1.0 and True are in it, too
        raise ValueError(f"{file}: `gold` of {name} must be from 0 to {choices - 1}, got {gold!r}.")
    asked = [context.rstrip() + ask for context in contexts] * len(answers)
    continuations = [f" {answer}" for answer in answers] * len(contexts)
    pairs = list(zip(asked, continuations, strict=True))
    first = pairs.index(pairs[gold])  # equal answers are equally likely, and `likeliest` takes the first
    return Item(id=name, contexts=asked, continuations=continuations, gold=first)
