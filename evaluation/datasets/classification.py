# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets for classification, and decoding of a language model constrained to the names of the classes."""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import torch
from transformers import DynamicCache

from diffllama.evaluation.datasets.data import Source, field, read_rows, read_text
from diffllama.evaluation.likelihood import CHUNK, batches, likeliest, new_cache
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.settings import ClassificationTask


COARSE = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "numeric",
}
"""TREC's coarse codes -> class names."""

FINE = {
    "abb": "abbreviation",
    "cremat": "creation",
    "def": "definition",
    "desc": "description",
    "dismed": "disease",
    "dist": "distance",
    "exp": "expansion",
    "gr": "group",
    "ind": "individual",
    "instru": "instrument",
    "lang": "language",
    "mount": "mountain",
    "ord": "order",
    "perc": "percent",
    "techmeth": "technique",
    "temp": "temperature",
    "termeq": "term",
    "veh": "vehicle",
    "volsize": "size",
}
"""TREC's fine codes that are not words -> class names."""

BATCH_TOKENS = 8192
"""Maximum number of tokens in the KV cache of a batch of questions, unless one question alone has more."""


@dataclass(frozen=True)
class Example:
    """A text and its class, both without line breaks or repeated spaces."""

    text: str
    label: str


Rows = Iterator[tuple[str, str, str]]
"""Texts, classes, and their places in a file."""


def read_trec(file: Path, part: str, fine: bool) -> Rows:
    """Read TREC's questions: lines `COARSE:fine question` in Latin-1.

    Classes are coarse, such as `location`, or with `fine` coarse and fine, such as `location city`.
    """
    mark = "\ufeff".encode().decode("latin-1")  # byte order mark of UTF-8, which some editors add
    for number, line in enumerate(read_text(file, "latin-1").removeprefix(mark).split("\n"), 1):
        if not line.strip():
            continue
        match = re.match(r"(\w+):(\w+)\s+(.+)", line)
        if not match or match[1] not in COARSE:
            raise ValueError(
                f"{file}, line {number} must be `COARSE:fine question`, COARSE one of {', '.join(COARSE)}, "
                f"got `{line[:40]}`."
            )
        label = COARSE[match[1]]
        yield match[3], f"{label} {FINE.get(match[2], match[2])}" if fine else label, f"{file}:{number}"


def read_banking(file: Path, part: str) -> Rows:
    """Read Banking77's queries: CSV with the columns `text` and `category`."""
    for number, row in enumerate(read_rows(file), 1):
        yield field(row, "text", file), field(row, "category", file), f"{file}, row {number},"


def read_clinc(file: Path, part: str) -> Rows:
    """Read CLINC150's utterances, without those out of scope: JSON with lists `train` and `test` of [text, intent]."""
    try:
        whole = json.loads(read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    rows = whole.get(part) if isinstance(whole, dict) else None
    if not isinstance(rows, list):
        raise ValueError(f"{file} must be a JSON object with lists `train` and `test` of [text, intent].")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list) or len(row) != 2 or not all(isinstance(text, str) for text in row):
            raise ValueError(f"{file}, row {number} of `{part}` must be [text, intent], got {json.dumps(row)}.")
        yield *row, f"{file}, row {number} of `{part}`,"


@dataclass(frozen=True)
class Task:
    """A data set and the words of its prompts.

    Args:
        read: reads the rows of a file's part, `train` or `test`.
        train: possible names of the file with training examples; the first that exists is read.
        test: possible names of the file with test examples; likewise.
        text: the word before a text.
        label: the word before its class.
    """

    read: Callable[[Path, str], Rows]
    train: tuple[str, ...]
    test: tuple[str, ...]
    text: str
    label: str


TREC = (("train.txt", "train_5500.label"), ("test.txt", "TREC_10.label"), "Question", "Type")

TASKS: dict[ClassificationTask, Task] = {
    "trec": Task(partial(read_trec, fine=False), *TREC),
    "trec-fine": Task(partial(read_trec, fine=True), *TREC),
    "banking77": Task(read_banking, ("train.csv",), ("test.csv",), "query", "intent"),
    "clinc150": Task(read_clinc, ("data_full.json",), ("data_full.json",), "utterance", "intent"),
}
"""The prompts' words are those of Bertsch et al. (arXiv 2405.00200)."""


def read_examples(task: ClassificationTask, source: Source) -> tuple[list[Example], list[Example]]:
    """Read training examples and test examples. Training examples whose text is also a test example's are left out.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is malformed, or a class of the test examples has no training example.
    """
    names = {"train": TASKS[task].train, "test": TASKS[task].test}
    if source.path.is_file() and names["train"] != names["test"]:
        needed = " and ".join(first for first, *_ in names.values())
        raise ValueError(f"{source.path} is a file. Name the folder that has {needed} with --data.")
    parts: dict[str, list[Example]] = {part: [] for part in names}
    for part, examples in parts.items():
        for text, label, place in TASKS[task].read(source.file(*names[part]), part):
            example = Example(" ".join(text.split()), " ".join(label.replace("_", " ").split()))
            if not example.text or not example.label:
                raise ValueError(f"{place} has no {'class' if example.text else 'text'}.")
            examples.append(example)
    test = parts["test"]
    texts = {example.text for example in test}
    train = [example for example in parts["train"] if example.text not in texts]
    if not test:
        raise ValueError(f"{source.path} has no test examples.")
    if unknown := {example.label for example in test} - {example.label for example in train}:
        raise ValueError(f"{source.path} has no training examples of the test classes {', '.join(sorted(unknown))}.")
    return train, test


@dataclass(frozen=True)
class Prompt:
    """A question whose answer is a class, as token ids.

    Args:
        context: the tokens before the question. Successive prompts with equal contexts are computed from one KV cache.
        question: the tokens up to the answer.
        options: each class's answer. None may begin with another.
    """

    context: list[int]
    question: list[int]
    options: Mapping[str, list[int]]


def option_ids(loaded: LoadedModel, before: str, answers: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the token ids of each class's answer after the text `before`.

    Raises:
        ValueError: the tokens of one answer are the beginning of another's.
    """
    start = len(loaded.encode(before))
    options = {label: loaded.encode(before + answer)[start:] for label, answer in answers.items()}
    for (first, shorter), (second, longer) in pairwise(sorted(options.items(), key=lambda option: option[1])):
        if longer[: len(shorter)] == shorter:
            raise ValueError(
                f"The tokenizer of {loaded.name} must not encode class {first} as the beginning of {second}."
            )
    return options


@torch.inference_mode()
def classify(loaded: LoadedModel, prompts: Mapping[str, Prompt]) -> Iterator[tuple[str, str]]:
    """Decode greedily, constrained to the options: each step takes the likeliest token that continues an option.

    Questions of one context share its KV cache, which is copied for each batch. A context that begins with the
    previous one extends that cache.

    Yields:
        The prompt's name and its class, batch by batch.

    Raises:
        ValueError: the model's scores are NaN.
    """
    cache = new_cache(loaded.model)
    cached: list[int] = []
    for context, group in groupby(prompts, key=lambda name: prompts[name].context):
        if context[: len(cached)] != cached:
            cache, cached = new_cache(loaded.model), []
        for part in loaded.tensor(context[len(cached) :]).split(CHUNK, dim=1):
            loaded.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cached = context
        lengths = {name: len(context) + len(prompts[name].question) for name in group}
        for names in batches(lengths, BATCH_TOKENS):
            yield from zip(names, _answers(loaded, cache, [prompts[name] for name in names]), strict=True)


def _answers(loaded: LoadedModel, cache: DynamicCache, prompts: Sequence[Prompt]) -> list[str]:
    """Return the classes of questions of equal length whose context is in the cache. The cache is not changed."""
    cache, dtype = copy.deepcopy(cache), str(loaded.model.dtype).removeprefix("torch.")
    cache.batch_repeat_interleave(len(prompts))
    left = [list(prompt.options) for prompt in prompts]  # the classes that an answer can still become
    tokens, step = [prompt.question for prompt in prompts], 0
    while any(len(labels) > 1 for labels in left):
        ids = torch.tensor(tokens, device=loaded.model.device)
        logits = loaded.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        for row, (prompt, labels) in enumerate(zip(prompts, left, strict=True)):
            if len(labels) > 1:
                allowed = sorted({prompt.options[label][step] for label in labels})
                tokens[row] = [allowed[likeliest(logits[row, allowed].tolist(), dtype)]]
                left[row] = [label for label in labels if prompt.options[label][step] == tokens[row][0]]
            else:
                tokens[row] = tokens[row][-1:]  # its answer is known: any token serves as input
        step += 1
    return [label for (label,) in left]
