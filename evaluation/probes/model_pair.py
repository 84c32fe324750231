# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Base class of probes that build a differential model and its matched Transformer, with random weights."""

from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from diffllama.configuration import baseline, preset
from diffllama.evaluation.models import ModelSpec, available_device
from diffllama.evaluation.runs import Probe, S
from diffllama.evaluation.settings import ModelPairSettings
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
"""A V1 model that a laptop can train."""

Pair = dict[str, PreTrainedModel]
"""The models by the names `transformer` and `diff`."""


class ModelPairProbe(ModelPairSettings, Probe[S]):
    """Measures a pair of models that it builds itself."""

    @property
    def place(self) -> torch.device:
        """The device of the models."""
        return available_device(self.device)

    @property
    def labels(self) -> dict[str, str]:
        """The models' names in figures."""
        return {"transformer": "Transformer", "diff": f"DIFF {self.configs()['diff'].diff_variant.upper()}"}

    def configs(self, **fields: Any) -> dict[str, PretrainedConfig]:
        """Return the configurations of the two models, with `fields` replaced."""
        make = partial(partial(preset, self.size) if self.size else partial(DiffLlamaConfig, **SMALL), **fields)
        diff = make()
        if self.variant == "v2" and diff.diff_variant == "v1":
            heads = ("num_attention_heads", "num_noise_heads", "num_key_value_heads")
            doubled = {name: 2 * getattr(diff, name) for name in heads}
            diff = make(diff_variant="v2", head_dim=diff.rotary_dim, **doubled)
        return {"transformer": baseline(diff), "diff": diff}

    def pair(self, dtype: str, **fields: Any) -> ModelSpec:
        """Return a spec of both models, with weights drawn from the same seed and `fields` replaced."""
        configs = self.configs(**fields)

        def build(config: PretrainedConfig) -> PreTrainedModel:
            torch.manual_seed(self.seed)
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")

        def load() -> Pair:
            with self.place:
                return {name: build(config) for name, config in configs.items()}

        with torch.device("meta"):
            parameters = {name: build(config).num_parameters() for name, config in configs.items()}
        facts = {"parameters": parameters, "dtype": dtype, "device": str(self.place)}
        return ModelSpec(f"{self.variant} {self.size or 'small'}", facts, load)
