# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads a converted folder without diffllama, compares it with its original and asks it a question.

Usage: python talk.py FOLDER ORIGINAL.gguf PROMPT
"""

import sys
from pathlib import Path


sys.modules["diffllama"] = None  # type: ignore[assignment]  # from here on `import diffllama` fails


def main(folder: str, gguf: str, prompt: str) -> int:
    """Check that the logits are equal and stream an answer. Returns the exit status."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

    print("Loading the differential model with trust_remote_code=True; diffllama cannot be imported here.", flush=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    print(f"  {type(model).__name__} from {type(model).__module__}", flush=True)

    print("Loading the original Llama to compare ...", flush=True)
    original = AutoModelForCausalLM.from_pretrained(Path(gguf).parent, gguf_file=Path(gguf).name)
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        equal = torch.equal(model(**inputs).logits, original(**inputs).logits)
    print(f"  logits equal bit for bit: {equal}\n", flush=True)
    if not equal:
        return 1

    print(f"> {prompt}\n", flush=True)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    generator(messages, max_new_tokens=128, do_sample=False, streamer=streamer)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
