# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight maps: what becomes of each tensor of a source checkpoint, as data, and the engine that applies them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


TensorOperation = Callable[[torch.Tensor, DiffLlamaConfig], torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """Where a source tensor goes and what is done to it on the way.

    Attributes:
        target: name in our state dict, a template with the source's `{i}`.
        operation: changes the tensor; `None` copies it.
    """

    target: str
    operation: TensorOperation | None = None


WeightMap = Mapping[str, Rule | None]
"""Source name, a template with `{i}` for the layer, -> rule; `None` drops the tensor deliberately."""


def apply_weight_map(
    source: Mapping[str, torch.Tensor],
    weight_map: WeightMap,
    config: DiffLlamaConfig,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Applies `weight_map` to every tensor of `source`.

    Args:
        source: the source's state dict.
        weight_map: see `WeightMap`.
        config: configuration of the result, for operations that need sizes.
        progress: called with the number of tensors done and their total after each one.

    Returns:
        Our state dict, as far as it comes from tensors of the source.

    Raises:
        ValueError: the map has no rule for a tensor, or gives two tensors the same target.
    """
    patterns = {re.compile(re.escape(key).replace(r"\{i\}", r"(\d+)")): rule for key, rule in weight_map.items()}
    result = {}
    for done, (name, tensor) in enumerate(source.items(), start=1):
        matches = [(match, rule) for pattern, rule in patterns.items() if (match := pattern.fullmatch(name))]
        if not matches:
            raise ValueError(f"The weight map has no rule for tensor {name!r} of shape {tuple(tensor.shape)}.")
        match, rule = matches[0]
        if rule is not None:
            target = rule.target.format(i=match.group(1)) if match.groups() else rule.target
            if target in result:
                raise ValueError(f"The weight map makes {target!r} of two tensors, the second of them {name!r}.")
            result[target] = tensor if rule.operation is None else rule.operation(tensor, config)
        if progress is not None:
            progress(done, len(source))
    return result
