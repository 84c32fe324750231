# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers as sources and results of a conversion: their outputs, and how to save them."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from diffllama.checkpoints.errors import CheckpointError, lines
from diffllama.checkpoints.models import TransformersSource, meta_model
from diffllama.conversion.verification import model_outputs
from diffllama.hub_cards.code import write_code
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


class TransformersModel(TransformersSource):
    """A checkpoint of a transformers model that computes its outputs."""

    @property
    def model_type(self) -> str:
        """transformers' name of the model type."""
        return self.config.model_type

    def outputs(
        self, dtype: torch.dtype, implementation: str, rounded: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Compute the model's outputs in a dtype with an attention function, see `verification.model_outputs`.

        With `rounded`, weights are rounded to that dtype first. Buffers, such as rotary frequencies, stay in float32.
        Weights are contiguous, because torch may choose other kernels for other strides.
        """
        model = self.load(rounded or dtype, implementation)
        for parameter in model.parameters():
            if rounded is not None:
                parameter.data = parameter.data.to(rounded)
            parameter.data = parameter.data.to(dtype).contiguous()
        return model_outputs(model)

    def load(self, dtype: torch.dtype, implementation: str) -> PreTrainedModel:
        """Load the model, from a GGUF file in float32. Raises `CheckpointError` for tensors that are missing."""
        if self.src.is_file():
            self.gguf_model.set_attn_implementation(implementation)
            return self.gguf_model
        config = AutoConfig.from_pretrained(**self.location)
        config._attn_implementation = implementation  # an argument would not override config.json
        model, report = AutoModelForCausalLM.from_pretrained(
            **self.location, config=config, dtype=dtype, output_loading_info=True
        )
        if report["missing_keys"]:
            problem = "transformers does not find these tensors when it loads the model (--no-verify skips loading)"
            raise CheckpointError(lines(problem, sorted(report["missing_keys"])))
        return model.eval()


def save_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write a configuration and, for a diffllama model, its code."""
    config.architectures = [type(meta_model(config)).__name__]
    config.save_pretrained(folder)
    if config.model_type == DiffLlamaConfig.model_type:
        write_code(folder)
