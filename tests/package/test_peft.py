"""peft adapts the model as it adapts a Llama."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, PreTrainedModel

from diffllama import DiffLlamaForCausalLM
from diffllama.training.lambdas import train_lambdas
from support import subprocess_runner
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tokens


TASK = "CAUSAL_LM"
METHODS: dict[str, PeftConfig] = {
    "LoRA": LoraConfig(task_type=TASK),
    "DoRA": LoraConfig(task_type=TASK, use_dora=True),
    "AdaLoRA": AdaLoraConfig(task_type=TASK, total_step=100),
    "IA3": IA3Config(task_type=TASK),
    "LoHa": LoHaConfig(task_type=TASK),
    "OFT": OFTConfig(task_type=TASK, oft_block_size=8),
    "VeRA": VeraConfig(task_type=TASK),
}
"""Methods that need layers to adapt, none of which is named."""
FIELDS: dict[str, dict[str, Any]] = {"v1": EVERY_FEATURE, "v2": {"gated_mlp": False}}
"""Variant -> what its model has."""


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(2, 9)).logits


def train(model: torch.nn.Module, steps: int = 3) -> list[float]:
    """Train all trainable parameters. Returns the losses."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model.train()(tokens(2, 9), labels=tokens(2, 9)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_method_knows_a_llamas_layers_in_whatever_order_one_imports() -> None:
    code = """
import diffllama, peft
import sys
import peft.utils.constants as constants

known = {n: m for n, m in vars(constants).items() if n.startswith("TRANSFORMERS_MODELS_TO_") and "llama" in m}
assert len(known) > 5
facts["first"] = all(mapping["diff_llama"] == mapping["llama"] for mapping in known.values())

for mapping in known.values():  # as if peft had been imported first
    del mapping["diff_llama"]
for name in [name for name in sys.modules if name.partition(".")[0] == "diffllama"]:
    del sys.modules[name]
import diffllama
facts["last"] = all(mapping["diff_llama"] == mapping["llama"] for mapping in known.values())
"""
    assert subprocess_runner.facts(code, {}) == {"first": True, "last": True}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_adapter_without_named_layers_begins_as_the_model_and_learns(variant: str, method: str, tmp_path: Path) -> None:
    base = logits(tiny_model(variant, **FIELDS[variant]))
    model = get_peft_model(tiny_model(variant, **FIELDS[variant]), METHODS[method])
    if method == "LoRA":  # default targets of a Llama
        assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"q_proj", "v_proj"}
    torch.testing.assert_close(logits(model), base, rtol=0, atol=1e-5)
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    losses = train(model)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    adapted = logits(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_model(variant, **FIELDS[variant]), tmp_path)
    assert torch.equal(logits(again), adapted)
    merged = again.merge_and_unload()
    assert type(merged) is DiffLlamaForCausalLM
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_tuning_learns(variant: str) -> None:
    model = get_peft_model(tiny_model(variant), PromptTuningConfig(task_type=TASK, num_virtual_tokens=4))
    losses = train(model, steps=5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("variant", "saved"), [("v1", ["act_fn"]), ("v2", ["act_fn", "lambda_proj"])])
def test_polynorm_and_v2s_projection_of_lambda_can_be_trained_in_full_beside_an_adapter(
    variant: str, saved: list[str], tmp_path: Path
) -> None:
    config = LoraConfig(task_type=TASK, target_modules="all-linear", exclude_modules=saved, modules_to_save=saved)
    model = get_peft_model(tiny_model(variant, **EVERY_FEATURE), config)
    full = {name: p.clone() for name, p in model.named_parameters() if "modules_to_save" in name}
    assert {module for module in saved for name in full if module in name} == set(saved)
    train(model)
    assert not any(torch.equal(model.get_parameter(name), p) for name, p in full.items())
    adapted = logits(model)
    model.save_pretrained(tmp_path)
    merged = PeftModel.from_pretrained(tiny_model(variant, **EVERY_FEATURE), tmp_path).merge_and_unload()
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=2e-5)


NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.float32,
    "llm_int8_skip_modules": ["lambda_proj", "lm_head"],
}
"""4 bits, but for the projection of λ: it could not be trained, and bitsandbytes' CPU kernel wants 32 outputs or more.
Naming one module to skip drops transformers' own list, which is the head."""
DIVISIBLE = {"intermediate_size": 128}  # divisible by 64, the weights per scale


def quantized(folder: Path, **fields: Any) -> PreTrainedModel:
    config = BitsAndBytesConfig(**fields)
    return DiffLlamaForCausalLM.from_pretrained(folder, quantization_config=config, attn_implementation="eager")


def dequantized(model: PreTrainedModel, variant: str) -> PreTrainedModel:
    """Return a float32 model with the rounded weights of a 4-bit model that has not run yet."""
    from bitsandbytes.functional import dequantize_4bit

    rounded = tiny_model(variant, **DIVISIBLE)
    with torch.no_grad():
        for name, p in model.named_parameters():
            state = getattr(p, "quant_state", None)
            rounded.get_parameter(name).copy_(p if state is None else dequantize_4bit(p.data, state))
    return rounded


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_4_bits_only_linear_layers_are_rounded(variant: str, tmp_path: Path) -> None:
    base = tiny_model(variant, **DIVISIBLE)
    base.save_pretrained(tmp_path)
    model = quantized(tmp_path, **NF4)
    rounded = dequantized(model, variant)
    floats = dict(base.named_parameters())
    errors = {name: ((p - floats[name]).std() / floats[name].std()).item() for name, p in rounded.named_parameters()}
    changed = {name for name in floats if "_proj." in name and "lambda" not in name}
    assert all(
        0 < error < 0.12 if name in changed else error == 0 for name, error in errors.items() if "norm" not in name
    )
    torch.testing.assert_close(model(tokens(2, 9)).logits, rounded(tokens(2, 9)).logits, rtol=0, atol=1e-4)
    expected = logits(rounded)  # without gradients, kernels round more
    assert (logits(model) - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_8_bits_the_logits_are_almost_the_models(variant: str, tmp_path: Path) -> None:
    base = tiny_model(variant, initializer_range=0.1)
    base.save_pretrained(tmp_path)
    expected = logits(base)
    assert 0 < (logits(quantized(tmp_path, load_in_8bit=True)) - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize("bits", [NF4, {"load_in_8bit": True}], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_adapter_learns_on_a_quantized_model_and_loads(variant: str, bits: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(variant, **DIVISIBLE).save_pretrained(tmp_path / "base")
    model = prepare_model_for_kbit_training(quantized(tmp_path / "base", **bits))
    model = get_peft_model(model, LoraConfig(task_type=TASK))
    before = {name: p.clone() for name, p in model.named_parameters()}
    losses = train(model)
    assert losses[-1] < losses[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert {name.split(".")[-4] for name in moved} == {"q_proj", "v_proj"}
    model.save_pretrained(tmp_path / "adapter")
    again = quantized(tmp_path / "base", **bits)
    if "load_in_4bit" in bits:
        rounded = PeftModel.from_pretrained(dequantized(again, variant), tmp_path / "adapter")
        expected = rounded.train()(tokens(2, 9)).logits
        torch.testing.assert_close(model.train()(tokens(2, 9)).logits, expected, rtol=0, atol=1e-3)
    assert torch.equal(logits(PeftModel.from_pretrained(again, tmp_path / "adapter")), logits(model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_lambda_is_trained_in_full_beside_an_adapter_of_a_quantized_model(variant: str, tmp_path: Path) -> None:
    tiny_model(variant, **DIVISIBLE).save_pretrained(tmp_path / "base")
    model = prepare_model_for_kbit_training(quantized(tmp_path / "base", **NF4))
    model = get_peft_model(model, LoraConfig(task_type=TASK, modules_to_save=["lambda_proj"]))
    if variant == "v1":  # has no such module
        train_lambdas(model)
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert any("lambda_" in name for name in before)
    losses = train(model)
    assert losses[-1] < losses[0]
    assert not any(torch.equal(model.get_parameter(name), p) for name, p in before.items())
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(quantized(tmp_path / "base", **NF4), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))


REMOTE = """
import importlib.util
import sys
sys.modules["diffllama"] = None  # from here on importing it fails
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

ids = load_file("ids.safetensors")["ids"]
for variant in ("v1", "v2"):
    model = AutoModelForCausalLM.from_pretrained(f"{variant}/base", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        tensors = {"adapted": PeftModel.from_pretrained(model, f"{variant}/adapter").eval()(ids).logits}
        if importlib.util.find_spec("bitsandbytes"):
            model = AutoModelForCausalLM.from_pretrained(
                f"{variant}/base", trust_remote_code=True, attn_implementation="eager",
                quantization_config=BitsAndBytesConfig(**torch.load("bits.pt")),
            )
            tensors["quantized"] = model(ids).logits
    save_file(tensors, f"{variant}/logits.safetensors")
"""


def test_adapter_and_its_trained_lambda_load_onto_the_model_of_remote_code(tmp_path: Path) -> None:
    expected = {}
    for variant in VARIANTS:
        base, adapter = tmp_path / variant / "base", tmp_path / variant / "adapter"
        model = tiny_model(variant, attn_implementation="sdpa", **DIVISIBLE)
        model.save_pretrained(base)
        model = get_peft_model(model, LoraConfig(task_type=TASK, modules_to_save=["lambda_proj"]))
        if variant == "v1":  # has no such module
            train_lambdas(model)
        train(model)
        model.save_pretrained(adapter)
        assert any("lambda_" in name for name in load_file(adapter / "adapter_model.safetensors"))
        expected[variant] = {"adapted": logits(model)}
        if importlib.util.find_spec("bitsandbytes"):
            expected[variant]["quantized"] = logits(quantized(base, **NF4))
    save_file({"ids": tokens(2, 9)}, tmp_path / "ids.safetensors")
    torch.save(NF4, tmp_path / "bits.pt")
    env = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "home")}
    subprocess_runner.run(REMOTE, environment=env, cwd=tmp_path)
    for variant, tensors in expected.items():
        computed = load_file(tmp_path / variant / "logits.safetensors")
        assert computed.keys() == tensors.keys()
        assert [name for name in tensors if not torch.equal(computed[name], tensors[name])] == []
