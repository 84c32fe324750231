"""torchao rounds the weights of linear layers, except those of λ, and nothing else changes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from diffllama import DiffLlamaForCausalLM
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tokens


quantization = pytest.importorskip("torchao.quantization")

RECIPES: dict[str, Any] = {
    "int8": quantization.Int8WeightOnlyConfig(),
    "int4": quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(32)),
}
LARGEST = {"int8": 0.01, "int4": 0.15}
"""Largest relative error of a weight."""
FIELDS: dict[str, dict[str, Any]] = {"plain": {}, "every feature": EVERY_FEATURE}
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_only_linear_layers_are_rounded_and_logits_are_those_of_the_rounded_weights(
    variant: str, recipe: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(variant, **SIZES | fields)
    model.save_pretrained(tmp_path / "base")
    config = TorchAoConfig(RECIPES[recipe], modules_to_not_convert=[".*lambda_proj", "lm_head"])
    quantized = DiffLlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    rounded = copy.deepcopy(model)
    for name, parameter in quantized.named_parameters():
        if type(parameter.data) is torch.Tensor:
            assert "_proj.weight" not in name or "lambda" in name, name
            assert torch.equal(parameter, model.get_parameter(name)), name
        else:
            assert "_proj.weight" in name, name
            weight, expected = parameter.dequantize(), model.get_parameter(name).data
            assert 0 < (weight - expected).norm() / expected.norm() < LARGEST[recipe], name
            rounded.get_parameter(name).data = weight
    with torch.no_grad():
        logits, expected = (each(tokens(2, 9)).logits for each in (quantized, rounded))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    quantized.save_pretrained(tmp_path / "quantized")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    with torch.no_grad():
        assert torch.equal(again(tokens(2, 9)).logits, logits)
    size = {folder: (tmp_path / folder / "model.safetensors").stat().st_size for folder in ("base", "quantized")}
    assert size["quantized"] < 0.5 * size["base"]
