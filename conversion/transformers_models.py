# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers as sources and as results of a conversion: what they compute, and how they are saved."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.models import TransformersSource, meta_model, result_location
from diffllama.conversion.verification import Outputs, model_outputs
from diffllama.hub_cards.code import write_code
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


def load(location: dict[str, Any], dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    """Loads a model to be compared with another one. Raises `CheckpointError` if transformers misses tensors."""
    config = AutoConfig.from_pretrained(**location)
    config._attn_implementation = implementation  # an argument would not replace what config.json says
    model, report = AutoModelForCausalLM.from_pretrained(
        **location, config=config, dtype=dtype, output_loading_info=True
    )
    if report["missing_keys"]:
        raise CheckpointError(
            lines("Without --no-verify, transformers has to load the model, and it does not find these tensors",
                  sorted(report["missing_keys"]))
        )  # fmt: skip
    return model.eval()


def cast(model: PreTrainedModel, *dtypes: torch.dtype | None) -> PreTrainedModel:
    """Casts a model's parameters, and nothing else (rotary frequencies stay in float32), to one dtype after another.

    They are made contiguous too, for with other strides torch may choose other kernels.
    """
    for parameter in model.parameters():
        for dtype in dtypes:
            parameter.data = parameter.data if dtype is None else parameter.data.to(dtype)
        parameter.data = parameter.data.contiguous()
    return model


class ComparableSource(TransformersSource):
    """A checkpoint of a model of transformers, whose outputs can be compared with its conversion's."""

    def outputs(self, dtype: torch.dtype, implementation: str, rounded: torch.dtype | None = None) -> Outputs:
        """What the model computes in a dtype with an implementation of attention, see `verification`.

        With `rounded`, its weights are rounded to that dtype first.
        """
        if self.src.is_dir():
            return model_outputs(cast(load(self.location, rounded or dtype, implementation), dtype))
        self.gguf_model.set_attn_implementation(implementation)
        return model_outputs(cast(self.gguf_model, rounded, dtype))


class TransformersResult:
    """A folder that transformers loads: a model of ours, with its code, or a stock model."""

    stem = "model"
    """What files of weights are called."""

    def save_config(self, config: PreTrainedConfig, folder: Path) -> None:
        """Writes the configuration and, of a model of ours, its code."""
        model = meta_model(config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if config.model_type == DiffLlamaConfig.model_type:
            write_code(folder)

    def outputs(self, config: PreTrainedConfig, folder: Path, dtype: torch.dtype, implementation: str) -> Outputs:
        """What the model in a folder computes in a dtype with an implementation of attention."""
        return model_outputs(load(result_location(folder), dtype, implementation))
