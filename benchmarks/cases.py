# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The registry of what is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import attention, models
from benchmarks.implementations import ARCHITECTURES, Architecture, Implementation, Setting
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
        tokens: setting -> tokens of one step.
        cpu: sizes on the CPU if nothing else is said.
        cuda: sizes on a GPU.
        architectures: to which it applies.
        floor: which step's cost by arithmetic is told: see `cost.units`.
    """

    name: str
    about: str
    build: Callable[[Architecture, Setting], Any]
    step: Callable[[Any, str], Step]
    tokens: Callable[[Setting], int]
    cpu: Sizes
    cuda: Sizes
    architectures: tuple[Architecture, ...] = ARCHITECTURES
    floor: str | None = None

    def applies(self, implementation: Implementation) -> bool:
        """Whether an implementation can do it."""
        return implementation.architecture in self.architectures


def processed(setting: Setting) -> int:
    """Tokens of prompts or texts."""
    return setting.batch * setting.length


def generated(setting: Setting) -> int:
    """New tokens."""
    return setting.batch * setting.new_tokens


ALONE: dict[str, Any] = {"architectures": ("llama", "v1", "v2")}
TRAINED: dict[str, Any] = {"step": models.train, "tokens": processed, "cpu": (2, [512]), "cuda": (1, [4096])}
GENERATED: dict[str, Any] = {"build": models.plain_model, "tokens": generated}

CASES = {
    case.name: case
    for case in (
        Case("attention/prefill", "forward of attention alone", attention.Attention, attention.forward,
             processed, (1, [2048]), (1, [4096]), **ALONE, floor="prefill"),
        Case("attention/train", "forward and backward of attention alone", attention.Attention, attention.train,
             processed, (1, [2048]), (1, [4096]), **ALONE, floor="train"),
        Case("attention/decode", "attention of one query, after a cache", partial(attention.Attention, decoding=True),
             attention.forward, lambda setting: setting.batch, (1, [2048]), (1, [32768]), **ALONE, floor="decode"),
        Case("model/prefill", "a prompt at once", models.plain_model, models.prefill,
             processed, (1, [2048]), (1, [4096])),
        Case("model/decode", "one token after a dynamic cache", models.model_with_cache, models.decode,
             lambda setting: setting.batch, (1, [2048, 8192]), (1, [32768])),
        Case("model/train", "forward, backward and AdamW", models.trained_model, **TRAINED),
        Case("model/train-checkpointing", "the same with gradient checkpointing",
             partial(models.trained_model, checkpointing=True), **TRAINED),
        Case("model/train-autocast", "the same as model/train under autocast to bfloat16",
             partial(models.trained_model, autocast=True), **TRAINED),
        Case("generate/dynamic", "`generate` with a dynamic cache",
             step=models.generate, **GENERATED, cpu=(1, [512]), cuda=(8, [2048])),
        Case("generate/static", "`generate` with a static cache",
             step=partial(models.generate, cache_implementation="static"), **GENERATED,
             cpu=(1, [512]), cuda=(8, [2048])),
        Case("generate/continuous", "continuous batching: `generate_batch`",
             step=models.continuous, **GENERATED, cpu=(4, [512]), cuda=(32, [2048]),
             architectures=("llama", "v1", "v2")),
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
