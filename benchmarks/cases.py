# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The registry of benchmark cases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import attention, models
from benchmarks.implementations import ARCHITECTURES, Architecture, Setting
from benchmarks.measure import Step


Sizes = tuple[int, Sequence[int]]
"""Batch size in sequences, and sequence lengths in tokens."""


@dataclass(frozen=True)
class Case:
    """A benchmark case.

    Args:
        name: group and name, as in "model/decode".
        about: description in one line.
        build: (architecture, setting) -> inputs or model that the attention functions share.
        step: (result of `build`, name of an attention function) -> step to time.
        cpu: default sizes on a CPU.
        cuda: default sizes on a GPU.
        architectures: architectures that support the case.
    """

    name: str
    about: str
    build: Callable[[Architecture, Setting], Any]
    step: Callable[[Any, str], Step]
    cpu: Sizes
    cuda: Sizes
    architectures: tuple[Architecture, ...] = ARCHITECTURES


SINGLE_CALL = tuple(architecture for architecture in ARCHITECTURES if architecture != "transformers")
"""All but transformers' `diffllama`, which computes attention in several calls."""

CASES = {
    case.name: case
    for case in (
        Case("attention/prefill", "attention only, forward",
             attention.Attention, attention.forward, (1, [2048]), (1, [4096]), SINGLE_CALL),
        Case("attention/train", "attention only, forward and backward",
             attention.Attention, attention.train, (1, [2048]), (1, [4096]), SINGLE_CALL),
        Case("attention/decode", "attention only, one query and a full KV cache",
             partial(attention.Attention, decoding=True), attention.forward, (1, [2048]), (1, [32768]), SINGLE_CALL),
        Case("model/prefill", "forward of a whole prompt",
             models.plain_model, models.prefill, (1, [2048]), (1, [4096])),
        Case("model/decode", "forward of one token with a full dynamic cache",
             models.model_with_cache, models.decode, (1, [2048, 8192]), (1, [32768])),
        Case("model/train", "forward, backward and AdamW",
             models.trained_model, models.train, (2, [512]), (1, [4096])),
        Case("model/train-checkpointing", "model/train with gradient checkpointing",
             partial(models.trained_model, checkpointing=True), models.train, (2, [512]), (1, [4096])),
        Case("model/train-autocast", "model/train with autocast to bfloat16",
             partial(models.trained_model, autocast=True), models.train, (2, [512]), (1, [4096])),
        Case("generate/dynamic", "`generate` with a dynamic cache",
             models.plain_model, models.generate, (1, [512]), (8, [2048])),
        Case("generate/static", "`generate` with a static cache",
             models.plain_model, partial(models.generate, cache_implementation="static"), (1, [512]), (8, [2048])),
        Case("generate/continuous", "`generate_batch` (continuous batching)",
             models.plain_model, models.continuous, (4, [512]), (32, [2048]), SINGLE_CALL),
    )
}  # fmt: skip
"""Name -> case."""

DEFAULT = ("attention", "model/decode", "model/prefill", "model/train")
"""Cases and groups of a run that names none: attention, and the model cases with a goal."""


def choose(names: Sequence[str]) -> list[Case]:
    """Return the cases with these names or of these groups, each once.

    Raises:
        ValueError: a name is neither a case nor a group.
    """
    chosen: dict[str, Case] = {}
    for name in names:
        matches = {key: case for key, case in CASES.items() if name in (key, key.partition("/")[0])}
        if not matches:
            groups = dict.fromkeys(key.partition("/")[0] for key in CASES)
            raise ValueError(f"Unknown case or group {name!r}. Known: {', '.join((*groups, *CASES))}.")
        chosen |= matches
    return list(chosen.values())
