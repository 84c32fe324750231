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
from diffllama.conversion.transformers_models import TransformersModel
from diffllama.conversion.unilm import UnilmModel
from diffllama.conversion.weight_map import WeightMap
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


@dataclass(frozen=True)
class Converter:
    """One kind of conversion.

    Attributes:
        source: opens what is converted.
        convert_config: translates the source's configuration; refuses what cannot be converted.
        weight_map: selects the weight map by our configuration.
        new_weights: makes tensors that the source lacks.
        bit_equal, exact: see `verification.tolerance_for`.
    """

    source: Callable[[Path], TransformersModel | UnilmModel]
    convert_config: Callable[[Any], PreTrainedConfig]
    weight_map: Callable[[DiffLlamaConfig], WeightMap]
    new_weights: Callable[[DiffLlamaConfig], dict[str, Callable[[], torch.Tensor]]] = lambda config: {}
    bit_equal: bool = False
    exact: bool = True


def find_converter(source: str | None, target: str | None, variant: str | None, gqa_layout: str | None) -> Converter:
    """Finds a conversion by arguments of `convert`. Raises `ValueError` if there is none."""
    check_conversion(source, target, variant, gqa_layout)
    if source == "llama":
        return Converter(
            partial(TransformersModel, model_types=llama.MODEL_TYPES),
            partial(llama.convert_config, variant=variant or "v2"),
            lambda config: llama.WEIGHT_MAPS[config.diff_variant],
            llama.new_weights,
            bit_equal=True,
            exact=variant != "v1",
        )
    if source == "transformers":
        return Converter(
            partial(TransformersModel, model_types=transformers_diffllama.MODEL_TYPES),
            transformers_diffllama.convert_config,
            lambda config: transformers_diffllama.FROM_TRANSFORMERS,
        )
    if source is not None:
        layout = cast(GqaLayout, gqa_layout or "grouped")
        return Converter(
            partial(UnilmModel, variant=cast(Variant, source.removeprefix("unilm-")), gqa_layout=layout),
            partial(unilm.convert_config, gqa_layout=layout),
            lambda config: unilm.FROM_UNILM[config.diff_variant, layout],
        )
    ours = partial(TransformersModel, model_types=(DiffLlamaConfig.model_type,))
    if target == "transformers":
        return Converter(ours, transformers_diffllama.convert_config_back, transformers_diffllama.weight_map_back)
    assert target is not None
    return Converter(
        ours,
        partial(unilm.convert_config_back, variant=cast(Variant, target.removeprefix("unilm-"))),
        lambda config: unilm.TO_UNILM[config.diff_variant],
        unilm.new_weights,
    )
