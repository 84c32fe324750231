# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Sources and results of conversions that transformers has no class for. Their own code never runs."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from diffllama.checkpoints.json_files import read_json
from diffllama.checkpoints.models import check_layers, check_sizes, expected_tensors
from diffllama.conversion.transformers_models import TransformersModel
from diffllama.conversion.verification import token_ids
from diffllama.conversion.weight_map import WeightMap, inverse, plan
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


class ReferenceModel(TransformersModel):
    """A folder with its own config.json format, whose tensors have our shapes under other names.

    Args:
        src: the folder.
        model_type: `model_type` in config.json.
        translate: fields of config.json -> our fields; raises `ValueError` for features that our model lacks.
        weight_map: maps its names to ours.
        logits: computes the model: (token ids [b, n], its weights, our configuration) -> [b, n, vocabulary].

    Raises:
        FileNotFoundError: the folder or its config.json does not exist.
        ValueError: `src` is a file, or the folder has an adapter.
    """

    def __init__(
        self,
        src: Path,
        model_type: str,
        translate: Callable[[Mapping[str, Any]], dict[str, Any]],
        weight_map: WeightMap,
        logits: Callable[[torch.Tensor, Mapping[str, torch.Tensor], DiffLlamaConfig], torch.Tensor],
    ) -> None:
        super().__init__(src, (model_type,))
        if not src.is_dir():
            raise ValueError(f"{src} is not a folder. Name a folder with config.json and weights.")
        self.translate, self.weight_map, self.logits = translate, weight_map, logits

    @property
    def model_type(self) -> str:
        """`model_type` in config.json."""
        return self.model_types[0]

    @cached_property
    def config(self) -> DiffLlamaConfig:
        """The source's configuration as ours. Without `tie_word_embeddings`, the weights decide.

        Raises `ValueError` if config.json is not valid JSON, has absurd sizes, belongs to another or a quantized model,
        lacks fields or has features that our model lacks.
        """
        file = self.src / "config.json"
        fields = read_json(file)
        if fields.get("model_type") != self.model_type:
            raise ValueError(f"`model_type` in {file} must be {self.model_type!r}, got {fields.get('model_type')!r}.")
        if fields.get("quantization_config") is not None:
            raise ValueError("The source is quantized (`quantization_config`): convert the original weights instead.")
        check_sizes(fields, file)
        try:
            ours = self.translate(fields)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        if fields.get("tie_word_embeddings") is None:
            ours["tie_word_embeddings"] = "lm_head.weight" not in self.checkpoint.tensors
        return DiffLlamaConfig(diff_variant="v1", dtype=fields.get("dtype", fields.get("torch_dtype")), **ours)

    def expected(self) -> dict[str, torch.Tensor]:
        """Return the names and shapes that the tensors must have: our model's shapes, under the source's names."""
        check_layers(self.config.num_hidden_layers, len(self.checkpoint.tensors))
        steps = plan(expected_tensors(self.config), inverse(self.weight_map), self.config)
        return {name: step.result for name, step in steps.items()}

    @torch.inference_mode()
    def outputs(
        self, dtype: torch.dtype, implementation: str = "", rounded: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Compute the model's formulas, which have neither attention functions nor a KV cache."""
        weights = {name: self.checkpoint.read(name).to(rounded or dtype).to(dtype) for name in self.checkpoint.tensors}
        ids = token_ids(self.config.vocab_size, self.config.max_position_embeddings)
        return 2 * [self.logits(ids, weights, self.config)]


def require(fields: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `ValueError` for missing fields."""
    if missing := [name for name in names if fields.get(name) is None]:
        raise ValueError(f"these fields are missing: {', '.join(f'`{name}`' for name in missing)}.")
