# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight maps from a source's tensors to the result's, and the plan that follows from a map.

Shapes are planned on the meta device, where tensors have a shape and a dtype but no values.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.writing import Step
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


Operation = Callable[..., torch.Tensor]
"""(tensor, our configuration, *the rule's other tensors) -> tensor; see `operations`."""


@dataclass(frozen=True)
class Rule:
    """Conversion of a source tensor.

    Attributes:
        target: name in the result, a template with the source's `{i}`.
        operations: applied in this order; without any, the tensor is copied.
        others: names of further source tensors, templates too, which each operation receives.
    """

    target: str
    operations: tuple[Operation, ...] = ()
    others: tuple[str, ...] = ()


WeightMap = Mapping[str, "Rule | tuple[Rule, ...] | None"]
"""Source name, a template with `{i}` for the layer, -> rule or rules; `None` drops the tensor deliberately."""


def find_rules(name: str, weight_map: WeightMap) -> tuple[tuple[Rule, ...], str] | None:
    """Return the rules for a source tensor and its layer's number ("" if it has none), `None` without an entry."""
    for template, entry in weight_map.items():
        if match := re.fullmatch(re.escape(template).replace(r"\{i\}", "([0-9]+)"), name):
            rules = (entry,) if isinstance(entry, Rule) else entry or ()
            return rules, "".join(match.groups())
    return None


def inverse(weight_map: WeightMap) -> WeightMap:
    """Return the map that restores the old names, for a map with one target for each tensor. Values do not change."""
    return {rule.target: Rule(name) for name, rule in weight_map.items() if isinstance(rule, Rule)}


def plan(
    source: Mapping[str, torch.Tensor], weight_map: WeightMap, config: DiffLlamaConfig, dtype: torch.dtype | None = None
) -> dict[str, Step]:
    """Return the step that computes each tensor of the result, in the source's order.

    Args:
        source: the source's tensors, on the meta device.
        config: our configuration, from which operations read sizes.
        dtype: dtype of the result's floating-point tensors; by default the source's.

    Raises:
        CheckpointError: the map has no entry for a tensor, or two sources for one target.
    """
    steps: dict[str, Step] = {}
    unknown = []
    for name, tensor in source.items():
        match = find_rules(name, weight_map)
        if match is None:
            unknown.append(f"{name} {list(tensor.shape)}")
            continue
        rules, layer = match
        for rule in rules:
            target = rule.target.format(i=layer)
            if target in steps:
                raise CheckpointError(f"The weight map has two sources for {target!r}, the second is {name!r}.")
            inputs = (name, *(other.format(i=layer) for other in rule.others))

            def make(tensor: torch.Tensor, *others: torch.Tensor, rule: Rule = rule) -> torch.Tensor:
                cast = dtype if tensor.is_floating_point() else None
                if cast is not None and rule.operations:  # doubling may overflow float16
                    tensor = tensor.to(torch.promote_types(tensor.dtype, cast))
                for operation in rule.operations:
                    tensor = operation(tensor, config, *others)
                return tensor if cast is None else tensor.to(cast)

            steps[target] = Step(inputs, make, make(*(source[needed] for needed in inputs)))
    if unknown:
        raise CheckpointError(lines("The weight map has no entry for these tensors", unknown))
    return steps
