# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The available conversions, by the arguments of `convert`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig

from diffllama.checkpoints.options import Variant
from diffllama.conversion import llama, motif, perdix, transformers_diffllama, transformers_models, unilm
from diffllama.conversion.options import GqaLayout, check_conversion
from diffllama.conversion.reference_models import ReferenceModel
from diffllama.conversion.transformers_models import TransformersModel
from diffllama.conversion.unilm import UnilmModel
from diffllama.conversion.weight_map import WeightMap
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


Model = TransformersModel | UnilmModel

OURS = partial(TransformersModel, model_types=(DiffLlamaConfig.model_type,))
THEIRS = partial(TransformersModel, model_types=transformers_diffllama.MODEL_TYPES)
MOTIF = partial(
    ReferenceModel,
    model_type=motif.MODEL_TYPE,
    translate=motif.translate,
    weight_map=motif.FROM_MOTIF,
    logits=motif.logits,
)
PERDIX = partial(
    ReferenceModel,
    model_type=perdix.MODEL_TYPE,
    translate=perdix.translate,
    weight_map=perdix.FROM_PERDIX,
    logits=perdix.logits,
)


@dataclass(frozen=True)
class Converter:
    """One kind of conversion.

    Attributes:
        source: opens the checkpoint to convert.
        convert_config: translates the source's configuration; raises `ValueError` for what cannot be converted.
        weight_map: selects the weight map by our configuration.
        new_weights: creates tensors that the source lacks.
        bit_equal: see `verification.tolerance_for`.
        exact: whether our model with this configuration computes the source's function.
        result: opens the converted folder.
        save_config: writes the result's configuration.
    """

    source: Callable[[Path], Model]
    convert_config: Callable[[Any], PreTrainedConfig]
    weight_map: Callable[[DiffLlamaConfig], WeightMap]
    new_weights: Callable[[DiffLlamaConfig], dict[str, Callable[[], torch.Tensor]]] = lambda config: {}
    bit_equal: bool = False
    exact: Callable[[DiffLlamaConfig], bool] = lambda config: True
    result: Callable[[Path], Model] = OURS
    save_config: Callable[[Any, Path], None] = transformers_models.save_config


def find_converter(
    source: str | None, target: str | None, variant: str | None, gqa_layout: str | None, noise_heads: int | None
) -> Converter:
    """Find a conversion by arguments of `convert`. Raises `ValueError` if there is none."""
    check_conversion(source, target, variant, gqa_layout, noise_heads)
    if source == "llama":
        return Converter(
            partial(TransformersModel, model_types=llama.MODEL_TYPES),
            partial(llama.convert_config, variant=variant or "v2", noise_heads=noise_heads),
            lambda config: llama.WEIGHT_MAPS[config.diff_variant],
            llama.new_weights,
            bit_equal=True,
            exact=lambda config: config.diff_variant == "v2" and config.signals_per_noise == 1,
        )
    if source == "transformers":
        return Converter(
            THEIRS, transformers_diffllama.convert_config, lambda config: transformers_diffllama.FROM_TRANSFORMERS
        )
    if source == "motif":
        return Converter(MOTIF, lambda config: config, lambda config: motif.FROM_MOTIF)
    if source == "perdix":
        return Converter(PERDIX, lambda config: config, lambda config: perdix.FROM_PERDIX)
    if source is not None:
        layout = cast(GqaLayout, gqa_layout or "grouped")
        return Converter(
            partial(UnilmModel, variant=cast(Variant, source.removeprefix("unilm-")), gqa_layout=layout),
            partial(unilm.convert_config, gqa_layout=layout),
            lambda config: unilm.FROM_UNILM[config.diff_variant, layout],
        )
    if target == "transformers":
        convert_config, weight_map = transformers_diffllama.convert_config_back, transformers_diffllama.weight_map_back
        return Converter(OURS, convert_config, weight_map, result=THEIRS)
    if target == "motif":
        return Converter(
            OURS,
            motif.convert_config_back,
            lambda config: motif.TO_MOTIF,
            result=MOTIF,
            save_config=motif.save_config,
        )
    assert target is not None
    unilm_variant = cast(Variant, target.removeprefix("unilm-"))
    return Converter(
        OURS,
        partial(unilm.convert_config_back, variant=unilm_variant),
        lambda config: unilm.TO_UNILM[config.diff_variant],
        unilm.new_weights,
        result=partial(UnilmModel, variant=unilm_variant),
        save_config=unilm.save_config,
    )
