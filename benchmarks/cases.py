# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The registry of what is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import attention, models
from benchmarks.implementations import ARCHITECTURES, Architecture, Setting
from benchmarks.measure import Step


Sizes = tuple[int, Sequence[int]]
"""Batch, and lengths in tokens."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        name: with its group, as in "model/decode".
        about: one line.
        build: architecture and setting -> what its attention functions share: inputs, or a model.
        step: that and an attention function's name -> what is timed.
        cpu: sizes on the CPU if nothing else is said.
        cuda: sizes on a GPU.
        architectures: to which it applies.
    """

    name: str
    about: str
    build: Callable[[Architecture, Setting], Any]
    step: Callable[[Any, str], Step]
    cpu: Sizes
    cuda: Sizes
    architectures: tuple[Architecture, ...] = ARCHITECTURES


SINGLE_CALL = tuple(architecture for architecture in ARCHITECTURES if architecture != "transformers")
"""Without transformers' `diffllama`, whose attention is not one call."""

CASES = {
    case.name: case
    for case in (
        Case("attention/prefill", "forward of attention alone",
             attention.Attention, attention.forward, (1, [2048]), (1, [4096]), SINGLE_CALL),
        Case("attention/train", "forward and backward of attention alone",
             attention.Attention, attention.train, (1, [2048]), (1, [4096]), SINGLE_CALL),
        Case("attention/decode", "attention of one query, after a cache",
             partial(attention.Attention, decoding=True), attention.forward, (1, [2048]), (1, [32768]), SINGLE_CALL),
        Case("model/prefill", "a prompt at once",
             models.plain_model, models.prefill, (1, [2048]), (1, [4096])),
        Case("model/decode", "one token after a dynamic cache",
             models.model_with_cache, models.decode, (1, [2048, 8192]), (1, [32768])),
        Case("model/train", "forward, backward and AdamW",
             models.trained_model, models.train, (2, [512]), (1, [4096])),
        Case("model/train-checkpointing", "the same with gradient checkpointing",
             partial(models.trained_model, checkpointing=True), models.train, (2, [512]), (1, [4096])),
        Case("model/train-autocast", "the same as model/train under autocast to bfloat16",
             partial(models.trained_model, autocast=True), models.train, (2, [512]), (1, [4096])),
        Case("generate/dynamic", "`generate` with a dynamic cache",
             models.plain_model, models.generate, (1, [512]), (8, [2048])),
        Case("generate/static", "`generate` with a static cache",
             models.plain_model, partial(models.generate, cache_implementation="static"), (1, [512]), (8, [2048])),
        Case("generate/continuous", "continuous batching: `generate_batch`",
             models.plain_model, models.continuous, (4, [512]), (32, [2048]), SINGLE_CALL),
    )
}  # fmt: skip
"""By name."""

DEFAULT = ("attention", "model/decode", "model/prefill", "model/train")
"""What runs if nothing is named: what goals are for, and attention alone."""


def choose(names: Sequence[str]) -> list[Case]:
    """Cases by names or groups, each once.

    Raises:
        ValueError: there is none of a name.
    """
    chosen: dict[str, Case] = {}
    for name in names:
        found = {key: case for key, case in CASES.items() if name in (key, key.partition("/")[0])}
        if not found:
            groups = dict.fromkeys(key.partition("/")[0] for key in CASES)
            raise ValueError(f"No case or group {name!r}. Known: {', '.join((*groups, *CASES))}.")
        chosen |= found
    return list(chosen.values())
