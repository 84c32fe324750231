"""Writes the folders for the tests of vLLM, in an environment that has the package.

python tests/engines/folders.py DIR
"""

import json
import sys
from pathlib import Path
from typing import Any


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [f"{root}/tests", f"{root}/examples"]

from demo import smollm2_gguf
from peft import LoraConfig, get_peft_model

from diffllama.conversion.engine import convert
from diffllama.memory import memory, read_config
from support.tiny_models import tiny_model, tiny_tokenizer, tokens


SIZES = {
    "initializer_range": 0.1,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
"""vLLM's attention on CPUs takes no heads of less than 32."""

KINDS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "groups": {
        "num_attention_heads": 10,
        "num_noise_heads": 2,
        "num_key_value_heads": 2,
        "lambda_init": [-0.01, 0.2],
        "hidden_act": "poly_norm",
    },
    "gqa": {"num_key_value_heads": 2},
}
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def write(folder: Path) -> None:
    """Write tiny models of both variants and every kind, an adapter of each, converted SmolLM2, and its memory."""
    for variant in ("v1", "v2"):
        for name, fields in KINDS.items():
            model = tiny_model(variant, **SIZES | fields)
            model.save_pretrained(folder / f"{variant}-{name}")
            tiny_tokenizer().save_pretrained(folder / f"{variant}-{name}")
        adapted = get_peft_model(model, LoraConfig(r=8, target_modules=ADAPTED, init_lora_weights=False))
        adapted.save_pretrained(folder / f"{variant}-adapter")
        adapted.merge_and_unload().save_pretrained(folder / f"{variant}-merged")
        tiny_tokenizer().save_pretrained(folder / f"{variant}-merged")
    convert(smollm2_gguf(), folder / "smollm2", source="llama", dtype="float32", verify=False)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (3, 90, 17)]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    estimate = memory(read_config(folder / "smollm2"), context=1)
    (folder / "memory.json").write_text(json.dumps({"cache_per_token": estimate.cache_per_token}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
