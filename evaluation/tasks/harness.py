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
"""Settings of the needles probe that `--metadata` may set. Types and ranges are those of the probe."""

logger = logging.getLogger(__name__)


@contextmanager
def given(name: str, data: str | None, data_source: dict[str, bool] | None = None) -> Iterator[Source]:
    """Find the data called `name` in `data`, else in the environment variable DIFFLLAMA_DATA, else the built-in sample.

    Errors in the context name lm-eval's options. `data_source` is that dictionary of the task's metadata, which lm-eval
    writes into its results file. It gets the key `built_in`: whether the data are the built-in sample.
    """
    if data is not None and not isinstance(data, str):  # lm-eval parses 1 as a number
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
        raise ValueError(f"--metadata must not have data_source, which the task sets, got {data_source!r}.")
    if data_source is not None:
        data_source["built_in"] = source.built_in
    if source.built_in:
        logger.warning("The task uses the small built-in sample. Name real data with --metadata data=PATH.")


def multiple_choice(
    task: str, data: str | None = None, data_source: dict[str, bool] | None = None, **metadata: Any
) -> dict[str, Dataset]:
    """Read the items of one of the paper's seven tasks.

    Args:
        task: one of `multiple_choice.TASKS`.
        data: from `--metadata`, a folder with `multiple_choice/` and `hellaswag/`.
        data_source: see `given`.
        metadata: the model's arguments, which are ignored.

    Raises:
        FileNotFoundError: the data do not exist.
        ValueError: the data have another format.
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
    """Compute whether the correct answer of an item, a row of `multiple_choice`, has the highest log-likelihood.

    `results` has for each answer its log-likelihood, and whether it is the greedy completion.

    Raises:
        ValueError: a log-likelihood is NaN.
    """
    answer = likeliest([likelihood for likelihood, _ in results], "its dtype", "--model_args dtype=NAME")
    return {"accuracy": float(answer == doc["gold"])}


def accuracy_per_character(doc: Mapping[str, Any], results: Iterable[tuple[float, bool]]) -> dict[str, float]:
    """Compute whether the correct answer has the highest log-likelihood per character (lm-eval's `acc_norm`)."""
    pairs = zip(results, doc["continuations"], strict=True)
    return accuracy(doc, [(likelihood / len(text), greedy) for (likelihood, greedy), text in pairs])


def setting(name: str, value: Any) -> Any:
    """Check a setting of the needles probe: a number or, if the probe takes several, a list of numbers.

    Raises:
        ValueError: a number has a wrong type or is out of range, or the list is empty.
    """
    kind, option = get_args(get_type_hints(NeedlesSettings, include_extras=True)[name])
    (number_type,) = get_args(kind) or (kind,)
    several = kind is not number_type
    numbers = value if several and isinstance(value, list | tuple) else [value]
    most = math.inf if option.max is None else option.max
    # `type` rather than isinstance, because True is an int
    if not numbers or not all(type(item) in (int, number_type) and option.min <= item <= most for item in numbers):
        expected = f"a {'whole ' * (number_type is int)}number{' or a list of them' * several}, from {option.min}"
        expected += f" to {most}" * (most < math.inf)
        raise ValueError(f"--metadata {name} must be {expected}, got {value!r}.")
    numbers = [number_type(number) for number in numbers]
    return numbers if several else numbers[0]


def needles(
    needles: str, data: str | None = None, data_source: dict[str, bool] | None = None, **metadata: Any
) -> dict[str, Dataset]:
    """Make the prompts of `diffllama probe needles` for one entry of its setting `needles`.

    Args:
        needles: `R_of_N`.
        data: from `--metadata`, a folder with `novels/`, or with long texts.
        data_source: see `given`.
        metadata: the probe's settings `length` and `depth` (a number or a list), `samples_per_condition` and `seed`;
            and the model's arguments, of which `tokenizer` or `pretrained` names the tokenizer that counts tokens.

    Raises:
        FileNotFoundError: the data do not exist.
        ValueError: the data have no text, a setting in `metadata` is invalid, or no tokenizer is named.
    """
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(name, str):
        raise ValueError("Prompt lengths are in tokens. Name a tokenizer with --metadata tokenizer=DIR.")
    tokenizer = AutoTokenizer.from_pretrained(
        name,
        revision=metadata.get("revision", "main"),
        trust_remote_code=metadata.get("trust_remote_code", False),
    )
    settings = {name: setting(name, metadata[name]) for name in NUMBERS if name in metadata}
    probe = Needles(needles=[needles], **settings)
    with given(probe.dataset, data, data_source) as source:
        tasks = probe.samples(source, LoadedModel(name=name, model=None, tokenizer=tokenizer))  # needs no model
    return {"test": Dataset.from_list([{"prompt": asdict(task.prompt), **task.condition} for task in tasks.values()])}


def share_found(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Compute the fraction of the requested numbers of a row of `needles` that its completion contains."""
    return {"accuracy": Prompt(**doc["prompt"]).fraction_found(results[0])}
