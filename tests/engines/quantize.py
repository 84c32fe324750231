"""Quantizes folders, in an environment that has llm-compressor and not the package, and writes what is true of them.

python tests/engines/quantize.py DIR NAME... writes DIR/NAME-W8A8 and DIR/NAME-W4A16, each with `truth.json`: the
log-probabilities of `PROMPTS`' tokens, which the model computes in float32 with its rounded weights and activations.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


KEPT = ["lm_head", "re:.*lambda_proj"]
WEIGHTS = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
RECIPES: dict[str, dict[str, Any]] = {
    "W8A8": {"targets": "Linear", "scheme": "W8A8"},
    "W4A16": {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=WEIGHTS)}},
}


def logprobs(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of each token of each prompt but its first."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            of_all = model(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(of_all.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def quantize(folder: Path, recipe: str, prompts: list[list[int]]) -> None:
    """Write the quantized folder and the truth about it."""
    trust = {"trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **trust)
    plain = logprobs(model, prompts)
    oneshot(model=model, recipe=QuantizationModifier(ignore=KEPT, **RECIPES[recipe]), trust_remote_code_model=True)
    truth = {"plain": plain, "rounded": logprobs(model, prompts)}
    output = folder.with_name(f"{folder.name}-{recipe}")
    model.save_pretrained(output, save_compressed=True)
    AutoTokenizer.from_pretrained(folder, **trust).save_pretrained(output)
    (output / "truth.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for name in sys.argv[2:]:
        for recipe in RECIPES:
            quantize(root / name, recipe, json.loads((root / "prompts.json").read_text()))
