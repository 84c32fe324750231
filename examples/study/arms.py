# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The arms of a track: a Transformer and three differential models with as many parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from diffllama import DiffLlamaConfig
from diffllama.configuration import baseline


TRANSFORMER = "Transformer"

TOLERANCE = 0.01
"""Largest relative difference between the parameters of an arm and of the Transformer."""


def count_parameters(config: PretrainedConfig) -> int:
    """Count the parameters of a model without allocating them."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def check_sizes(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Count the parameters of each arm and of the Transformer that matches the first.

    Args:
        arms: fields of `DiffLlamaConfig` by arm.

    Raises:
        ValueError: an arm has over 1 % more or fewer than the Transformer.
    """
    configs = {arm: DiffLlamaConfig(**fields) for arm, fields in arms.items()}
    first = next(iter(configs.values()))
    sizes = {TRANSFORMER: count_parameters(baseline(first))}
    for arm, config in configs.items():
        sizes[arm] = count_parameters(config)
        if abs(sizes[arm] / sizes[TRANSFORMER] - 1) > TOLERANCE:
            raise ValueError(
                f"The arm {arm} must have as many parameters as the {TRANSFORMER}, {sizes[TRANSFORMER]:,}, within "
                f"{TOLERANCE:.0%}, got {sizes[arm]:,}. Change its `intermediate_size`."
            )
    return sizes
