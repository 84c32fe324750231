# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight maps: what becomes of each tensor of a source, as data, and the plan that follows from one.

Shapes are planned with tensors on the meta device, which have a shape and a dtype and no values.
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
    """What a source tensor becomes.

    Attributes:
        target: its name in the result, a template with the source's `{i}`.
        operations: what is done to it, in this order; none copies it.
        others: templates of more source tensors that every operation is given.
    """

    target: str
    operations: tuple[Operation, ...] = ()
    others: tuple[str, ...] = ()


WeightMap = Mapping[str, "Rule | tuple[Rule, ...] | None"]
"""Source name, a template with `{i}` for the layer, -> rule or rules; `None` drops the tensor deliberately."""


def find_rules(name: str, weight_map: WeightMap) -> tuple[tuple[Rule, ...], str] | None:
    """The rules for a source tensor and its layer's number ("" if it has none), or `None` if there is no entry."""
    for template, entry in weight_map.items():
        if match := re.fullmatch(re.escape(template).replace(r"\{i\}", "([0-9]+)"), name):
            rules = (entry,) if isinstance(entry, Rule) else entry or ()
            return rules, "".join(match.groups())
    return None


def inverse(weight_map: WeightMap) -> WeightMap:
    """Gives what a map has renamed its old names again, for a map that makes one tensor of each. Values stay."""
    return {rule.target: Rule(name) for name, rule in weight_map.items() if isinstance(rule, Rule)}


def plan(
    source: Mapping[str, torch.Tensor], weight_map: WeightMap, config: DiffLlamaConfig, dtype: torch.dtype | None = None
) -> dict[str, Step]:
    """How every tensor of the result is made, in the source's order.

    Args:
        source: the source's tensors, on the meta device.
        config: ours, which operations read sizes from.
        dtype: what floating-point tensors become; their own dtype by default.

    Raises:
        CheckpointError: the map has no entry for a tensor, or makes one tensor of two.
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
                raise CheckpointError(f"The weight map makes {target!r} of two tensors, the second of them {name!r}.")
            inputs = (name, *(other.format(i=layer) for other in rule.others))

            def make(tensor: torch.Tensor, *others: torch.Tensor, rule: Rule = rule) -> torch.Tensor:
                cast = dtype if tensor.is_floating_point() else None
                if cast is not None and rule.operations:  # twice a number of float16 may be too large for it
                    tensor = tensor.to(torch.promote_types(tensor.dtype, cast))
                for operation in rule.operations:
                    tensor = operation(tensor, config, *others)
                return tensor if cast is None else tensor.to(cast)

            steps[target] = Step(inputs, make, make(*(source[needed] for needed in inputs)))
    if unknown:
        raise CheckpointError(lines("The weight map has no entry for these tensors", unknown))
    return steps
