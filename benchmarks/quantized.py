# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Size, perplexity and speed of folders in vLLM, quantized or not. Runs in vLLM's environment, without this package."""

import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer


def perplexity(llm: Any, ids: list[int], length: int) -> tuple[float, float]:
    """Read tokens in pieces of `length`. Returns the perplexity, and the tokens read per second."""
    from vllm import SamplingParams

    pieces = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    settings = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": piece} for piece in pieces], settings, use_tqdm=False)
    seconds = time.perf_counter() - begun
    logprobs = [
        entry[token].logprob
        for piece, output in zip(pieces, outputs, strict=True)
        for token, entry in zip(piece[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return math.exp(-sum(logprobs) / len(logprobs)), length * len(pieces) / seconds


def decoding(llm: Any, prompt: list[int], new_tokens: int, rounds: int) -> float:
    """Return the tokens that one greedy request gets per second, in the fastest round."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
        times.append(time.perf_counter() - begun)
    return new_tokens / min(times)


def measure(folder: Path, text: str, length: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Return what is known of a folder: weights in MB, perplexity, and tokens per second read and written."""
    from vllm import LLM

    llm = LLM(
        model=str(folder), trust_remote_code=True, dtype=dtype, max_model_len=length + 64, max_num_seqs=8,
        enforce_eager=True, enable_prefix_caching=False, distributed_executor_backend="uni",
    )  # fmt: skip
    ids = llm.get_tokenizer()(text)["input_ids"]
    value, read = perplexity(llm, ids, length)
    written = decoding(llm, ids[:32], 32, rounds)
    llm.llm_engine.engine_core.shutdown()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    found = {"mb": size, "perplexity": value, "read_per_second": read, "written_per_second": written}
    return {"folder": folder.name, "dtype": dtype, "tokens": len(ids), **found}


def main(
    text: Annotated[Path, typer.Argument(help="File with text.")],
    folders: Annotated[list[Path], typer.Argument(help="Folders to compare.")],
    output: Annotated[Path, typer.Option("--json", help="JSON file for the results.")],
    characters: Annotated[int, typer.Option(min=1, help="Characters of the text to read.")] = 100_000,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a piece of text.")] = 512,
    dtype: Annotated[str, typer.Option(help="Dtype of what is not quantized.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of decoding.")] = 3,
) -> None:
    """Measure each folder in turn, on 100,000 characters of text, and write all results."""
    begin = text.read_text(encoding="utf-8")[:characters]
    results = [measure(folder, begin, length, dtype, rounds) for folder in folders]
    output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
