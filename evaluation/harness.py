# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The LM Evaluation Harness: its command line, and the items and metrics of the tasks in `tasks/`."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import setup_logging
from transformers import AutoTokenizer

from diffllama.evaluation.data import Source, find
from diffllama.evaluation.haystack import Prompt
from diffllama.evaluation.models import Subject
from diffllama.evaluation.multiple_choice import dataset_name, read
from diffllama.evaluation.probes.needles import Needles


TASKS = Path(__file__).parent / "tasks"

logger = logging.getLogger(__name__)


def run(arguments: Sequence[str]) -> None:
    """Runs lm-eval's own command line, which finds our tasks beside its own and those of `--include_path`."""
    setup_logging()
    sys.argv = ["lm-eval", *arguments]  # it takes them from there
    command_line = HarnessCLI()
    options = command_line.parse_args()
    if hasattr(options, "include_path"):
        config = EvaluatorConfig.load_yaml_config(options.config) if getattr(options, "config", None) else {}
        theirs = options.include_path or config.get("include_path")
        options.include_path = [str(TASKS), *([theirs] if theirs else [])]
    command_line.execute(options)


@contextmanager
def given(name: str, data: str | None) -> Iterator[Source]:
    """The data called `name` of `data`, or of the environment's DIFFLLAMA_DATA, or the built-in sample.

    Errors of who reads them name lm-eval's option.
    """
    path = data or os.environ.get("DIFFLLAMA_DATA")
    try:
        source = find(name, Path(path) if path else None)
        yield source
    except (FileNotFoundError, ValueError) as error:
        error.args = (str(error).replace("--data", "--metadata data=PATH"),)
        raise
    if source.built_in:
        logger.warning("These are the built-in sample's items: name real data with --metadata data=PATH.")


def multiple_choice(task: str, data: str | None = None, **metadata: Any) -> dict[str, Dataset]:
    """The items of one of the paper's seven tasks.

    Args:
        task: one of `multiple_choice.TASKS`.
        data: of `--metadata`: a folder with `multiple_choice/` and `hellaswag/`.
        metadata: the model's arguments, on which no item depends.

    Raises:
        FileNotFoundError: there are no such data.
        ValueError: they are something else.
    """
    with given(dataset_name(task), data) as source:
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
    """Whether the right answer of an item is the most likely one.

    Args:
        doc: a row of `multiple_choice`.
        results: for each answer its log-likelihood, and whether it is the greedy one.
    """
    return {"accuracy": float(np.argmax([likelihood for likelihood, _ in results]) == doc["gold"])}


def accuracy_per_character(doc: Mapping[str, Any], results: Iterable[tuple[float, bool]]) -> dict[str, float]:
    """Whether the right answer of an item has the highest log-likelihood per character; lm-eval's `acc_norm`."""
    pairs = zip(results, doc["continuations"], strict=True)
    return accuracy(doc, [(likelihood / len(text), greedy) for (likelihood, greedy), text in pairs])


def needles(needles: str, data: str | None = None, **metadata: Any) -> dict[str, Dataset]:
    """The prompts of `diffllama probe needles` for one N/R.

    Args:
        needles: N/R.
        data: of `--metadata`: a folder with `novels/`, or with long texts.
        metadata: `length` and `depth`, one or a list, `samples_per_cell` and `seed`, as the probe has them; and the
            model's arguments, of which `tokenizer` or `pretrained` names what counts the tokens.

    Raises:
        FileNotFoundError: there are no such data.
        ValueError: they have no text, a setting is none, or there is no tokenizer.
    """
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(name, str):
        raise ValueError("Prompts are measured in tokens. Name a tokenizer with --metadata tokenizer=DIR.")
    tokenizer = AutoTokenizer.from_pretrained(
        name,
        revision=metadata.get("revision", "main"),
        trust_remote_code=metadata.get("trust_remote_code", False),
    )
    lists = {name: np.atleast_1d(metadata[name]).tolist() for name in ("length", "depth") if name in metadata}
    numbers = {name: metadata[name] for name in ("samples_per_cell", "seed") if name in metadata}
    probe = Needles(needles=[needles], **lists, **numbers)
    with given(probe.dataset, data) as source:
        tasks = probe.samples(source, Subject(name=name, model=None, tokenizer=tokenizer))  # which needs no model
    return {"test": Dataset.from_list([{"prompt": asdict(task.prompt), **task.cell} for task in tasks.values()])}


def share_found(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The share of the numbers asked for that a completion has.

    Args:
        doc: a row of `needles`.
        results: the completion.
    """
    return {"accuracy": Prompt(**doc["prompt"]).found(results[0])}
