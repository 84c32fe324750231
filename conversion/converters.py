# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The conversions that exist, by the arguments of `convert`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig

from diffllama.checkpoints.options import Variant
from diffllama.conversion import llama, transformers_diffllama, unilm
from diffllama.conversion.options import GqaLayout, check_conversion
from diffllama.conversion.transformers_models import ComparableSource, TransformersResult
from diffllama.conversion.unilm import UnilmResult, UnilmSource
from diffllama.conversion.weight_map import WeightMap
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


@dataclass(frozen=True)
class Converter:
    """One kind of conversion.

    Attributes:
        source: opens what is converted.
        result: what it becomes.
        convert_config: translates the source's configuration; refuses what cannot be converted.
        weight_map: selects the weight map by our configuration.
        bit_equal, exact: see `verification.tolerance_for`.
        new_weights: makes tensors that the source lacks.
    """

    source: Callable[[Path], ComparableSource | UnilmSource]
    result: TransformersResult | UnilmResult
    convert_config: Callable[[Any], PreTrainedConfig]
    weight_map: Callable[[DiffLlamaConfig], WeightMap]
    bit_equal: bool = False
    exact: bool = True
    new_weights: Callable[[DiffLlamaConfig], dict[str, Callable[[], torch.Tensor]]] = lambda config: {}


def find_converter(source: str | None, target: str | None, variant: str | None, gqa_layout: str | None) -> Converter:
    """Finds a conversion by arguments of `convert`. Raises `ValueError` if there is none."""
    check_conversion(source, target, variant, gqa_layout)
    if source == "llama":
        chosen = variant or "v2"
        return Converter(
            source=partial(ComparableSource, model_types=llama.MODEL_TYPES),
            result=TransformersResult(),
            convert_config=partial(llama.convert_config, variant=chosen),
            weight_map=lambda config: llama.WEIGHT_MAPS[chosen],
            bit_equal=True,
            exact=chosen == "v2",
            new_weights=llama.new_weights,
        )
    if source == "transformers":
        return Converter(
            source=partial(ComparableSource, model_types=transformers_diffllama.MODEL_TYPES),
            result=TransformersResult(),
            convert_config=transformers_diffllama.convert_config,
            weight_map=lambda config: transformers_diffllama.FROM_TRANSFORMERS,
        )
    if source is not None:
        modules, keys = cast(Variant, source.removeprefix("unilm-")), cast(GqaLayout, gqa_layout or "grouped")
        return Converter(
            source=partial(UnilmSource, variant=modules, gqa_layout=keys),
            result=TransformersResult(),
            convert_config=partial(unilm.convert_config, gqa_layout=keys),
            weight_map=lambda config: unilm.FROM_UNILM[modules, keys],
        )
    ours = partial(ComparableSource, model_types=(DiffLlamaConfig.model_type,))
    if target == "transformers":
        return Converter(
            source=ours,
            result=TransformersResult(),
            convert_config=transformers_diffllama.convert_config_back,
            weight_map=transformers_diffllama.weight_map_back,
        )
    assert target is not None
    return Converter(
        source=ours,
        result=UnilmResult(),
        convert_config=partial(unilm.convert_config_back, variant=cast(Variant, target.removeprefix("unilm-"))),
        weight_map=lambda config: unilm.TO_UNILM[config.diff_variant],
        new_weights=unilm.new_weights,
    )
