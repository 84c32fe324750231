# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The items and metrics of the LM Evaluation Harness tasks in this folder."""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

from datasets import Dataset
from transformers import AutoTokenizer

from diffllama.evaluation.datasets.data import Source, find
from diffllama.evaluation.datasets.haystack import Prompt
from diffllama.evaluation.datasets.multiple_choice import dataset_name, read
from diffllama.evaluation.likelihood import likeliest
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.needles import Needles
from diffllama.evaluation.settings import NeedlesSettings


NUMBERS = ("length", "depth", "samples_per_condition", "seed")
"""Settings of the probe of needles that `--metadata` may have; their types and ranges are the probe's."""

logger = logging.getLogger(__name__)


@contextmanager
def given(name: str, data: str | None, data_source: dict[str, bool] | None = None) -> Iterator[Source]:
    """The data called `name` of `data`, or of the environment's DIFFLLAMA_DATA, or the built-in sample.

    Errors while reading them name lm-eval's option. `data_source` is the dictionary of that name in the task's
    metadata, which lm-eval writes into its results file after the task has read its data: it gets `built_in`, whether
    these are the built-in sample.
    """
    if data is not None and not isinstance(data, str):  # lm-eval makes a number of 1
        raise ValueError(f"--metadata data must be a path, such as ./novels, got {data!r}.")
    path = data or os.environ.get("DIFFLLAMA_DATA")
    try:
        source = find(name, Path(path) if path else None)
        yield source
    except (FileNotFoundError, ValueError) as error:
        message = str(error).replace("--data", "--metadata data=PATH")
        error.args = (message.replace("--length", "--metadata length=TOKENS"),)
        raise
    if not isinstance(data_source, dict | None):
        raise ValueError(f"--metadata data_source is what a task says of its data, got {data_source!r}. Leave it out.")
    if data_source is not None:
        data_source["built_in"] = source.built_in
    if source.built_in:
        logger.warning("These are the built-in sample's items: name real data with --metadata data=PATH.")


def multiple_choice(
    task: str, data: str | None = None, data_source: dict[str, bool] | None = None, **metadata: Any
) -> dict[str, Dataset]:
    """The items of one of the paper's seven tasks.

    Args:
        task: one of `multiple_choice.TASKS`.
        data: of `--metadata`: a folder with `multiple_choice/` and `hellaswag/`. data_source: see `given`.
        metadata: the model's arguments, on which no item depends.

    Raises:
        FileNotFoundError: there are no such data.
        ValueError: they are something else.
    """
    with given(dataset_name(task), data, data_source) as source:
        items = read(task, source)
    rows = [
        {
            "contexts": item.contexts,
            "continuations": [text.removeprefix(" ") for text in item.continuations],  # lm-eval adds the space
            "gold": item.gold,
        }
        for item in items
    ]
    return {"test": Dataset.from_list(rows)}


def accuracy(doc: Mapping[str, Any], results: Iterable[tuple[float, bool]]) -> dict[str, float]:
    """Whether the right answer of an item, a row of `multiple_choice`, is the most likely one.

    Of each answer, `results` has the log-likelihood, and whether it is the greedy one.

    Raises:
        ValueError: a log-likelihood is NaN.
    """
    answer = likeliest([likelihood for likelihood, _ in results], "its dtype", "--model_args dtype=NAME")
    return {"accuracy": float(answer == doc["gold"])}


def accuracy_per_character(doc: Mapping[str, Any], results: Iterable[tuple[float, bool]]) -> dict[str, float]:
    """Whether the right answer of an item has the highest log-likelihood per character; lm-eval's `acc_norm`."""
    pairs = zip(results, doc["continuations"], strict=True)
    return accuracy(doc, [(likelihood / len(text), greedy) for (likelihood, greedy), text in pairs])


def setting(name: str, value: Any) -> Any:
    """Check a setting of the probe of needles: a number or, where the probe takes several, a list of them.

    Raises:
        ValueError: a number has another type or is out of range, or the list is empty.
    """
    kind, option = get_args(get_type_hints(NeedlesSettings, include_extras=True)[name])
    (number_type,) = get_args(kind) or (kind,)
    several = kind is not number_type
    numbers = value if several and isinstance(value, list | tuple) else [value]
    most = math.inf if option.max is None else option.max
    # True is not a number here
    if not numbers or not all(type(one) in (int, number_type) and option.min <= one <= most for one in numbers):
        expected = f"a {'whole ' * (number_type is int)}number{' or a list of them' * several}, from {option.min}"
        expected += f" to {most}" * (most < math.inf)
        raise ValueError(f"--metadata {name} must be {expected}, got {value!r}.")
    numbers = [number_type(number) for number in numbers]
    return numbers if several else numbers[0]


def needles(
    needles: str, data: str | None = None, data_source: dict[str, bool] | None = None, **metadata: Any
) -> dict[str, Dataset]:
    """The prompts of `diffllama probe needles` for one entry of its `needles`.

    Args:
        needles: `R_of_N`.
        data: of `--metadata`: a folder with `novels/`, or with long texts. data_source: see `given`.
        metadata: `length` and `depth`, one or a list, `samples_per_condition` and `seed`, as the probe has them; and
            the model's arguments, of which `tokenizer` or `pretrained` names what counts the tokens.

    Raises:
        FileNotFoundError: there are no such data.
        ValueError: they have no text, a setting of `metadata` is wrong, or there is no tokenizer.
    """
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(name, str):
        raise ValueError("Prompts are measured in tokens. Name a tokenizer with --metadata tokenizer=DIR.")
    tokenizer = AutoTokenizer.from_pretrained(
        name,
        revision=metadata.get("revision", "main"),
        trust_remote_code=metadata.get("trust_remote_code", False),
    )
    settings = {name: setting(name, metadata[name]) for name in NUMBERS if name in metadata}
    probe = Needles(needles=[needles], **settings)
    with given(probe.dataset, data, data_source) as source:
        tasks = probe.samples(source, LoadedModel(name=name, model=None, tokenizer=tokenizer))  # which needs no model
    return {"test": Dataset.from_list([{"prompt": asdict(task.prompt), **task.condition} for task in tasks.values()])}


def share_found(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The fraction of the requested numbers of a row of `needles` that are found in its one completion."""
    return {"accuracy": Prompt(**doc["prompt"]).fraction_found(results[0])}
