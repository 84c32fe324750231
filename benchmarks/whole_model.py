# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models on the CPU or a GPU: ours, transformers' `diffllama` and the matched Llama, timed in turn in one run.

Usage: python -m benchmarks.whole_model [--context 2048] [--rounds 7] [--json FILE]

Prints times, medians over rounds (of decoding, the best of ten steps in each), and ratios to the Llama of the same
run. All models have 6 layers, hidden width 768 and keys and values of the same size: Llama 12 heads of 64, ours 6
differential heads (V1 d = 64; V2 12 heads of width 64 with two queries).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM
from diffllama.configuration import SHARED_FIELDS, baseline


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def models() -> dict[str, PreTrainedModel]:
    """The models to compare, all in float32 with sdpa."""
    size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4096}
    size |= {"max_position_embeddings": 16384, "rms_norm_eps": 1e-5}
    v1 = DiffLlamaConfig(**size, num_attention_heads=12, num_key_value_heads=6, head_dim=128)
    v2 = DiffLlamaConfig(**size, diff_variant="v2", num_attention_heads=24, num_key_value_heads=12, head_dim=64)
    theirs = transformers.DiffLlamaConfig(
        **{field: getattr(v1, field) for field in SHARED_FIELDS if field not in ("mlp_bias", "dtype")},
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
    )
    torch.manual_seed(0)
    made = {
        "llama": transformers.LlamaForCausalLM._from_config(baseline(v1), attn_implementation="sdpa"),
        "transformers diffllama": transformers.DiffLlamaForCausalLM._from_config(theirs, attn_implementation="sdpa"),
        "ours V1": DiffLlamaForCausalLM._from_config(v1, attn_implementation="sdpa"),
        "ours V2": DiffLlamaForCausalLM._from_config(v2, attn_implementation="sdpa"),
    }
    return {name: model.to(DEVICE).eval() for name, model in made.items()}


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(4096, (batch, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def decode(model: PreTrainedModel, context: int) -> Callable[[], object]:
    """One token after `context` tokens in a dynamic cache."""
    cache = model(tokens(1, context), use_cache=True, logits_to_keep=1).past_key_values
    token = tokens(1, 1)

    def step() -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return step


def prefill(model: PreTrainedModel, context: int) -> Callable[[], object]:
    """`context` tokens at once."""
    input_ids = tokens(1, context)
    return lambda: model(input_ids, use_cache=True, logits_to_keep=1)


def train(model: PreTrainedModel, context: int) -> Callable[[], object]:
    """Forward and backward of two sequences of a quarter of the context."""
    input_ids = tokens(2, context // 4)

    def step() -> None:
        with torch.enable_grad():
            model(input_ids, labels=input_ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


CASES = {"decode": decode, "prefill": prefill, "train": train}


def check(compared: dict[str, PreTrainedModel]) -> None:
    """What is timed is right: sdpa's logits, also decoded from a cache, equal eager attention's."""
    input_ids = tokens(1, 65)
    for name, model in compared.items():
        cache = model(input_ids[:, :-1], use_cache=True).past_key_values
        decoded = model(input_ids[:, -1:], past_key_values=cache).logits[:, -1]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(decoded, model(input_ids).logits[:, -1], rtol=1e-4, atol=1e-4, msg=name)
        model.set_attn_implementation("sdpa")


def seconds(step: Callable[[], object]) -> float:
    """Wall-clock time of one step."""
    start = time.perf_counter()
    step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens of context")
    parser.add_argument("--rounds", type=int, default=7, help="how often each model is timed in turn")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()

    compared = models()
    check(compared)
    machine = {
        "machine": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "context": arguments.context,
        "rounds": arguments.rounds,
    }
    table = Table("case", *compared, title="milliseconds, median (spread), ratio to llama")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for case, make in CASES.items():
        steps = {name: make(model, arguments.context) for name, model in compared.items()}
        repeats = 10 if case == "decode" else 1
        for step in steps.values():
            step()  # warm up
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                times[name].append(min(seconds(step) for _ in range(repeats)) * 1e3)
        llama = statistics.median(times["llama"])
        results[case] = {
            name: {
                "median_ms": statistics.median(values),
                "spread_ms": max(values) - min(values),
                "ratio": statistics.median(values) / llama,
            }
            for name, values in times.items()
        }
        cells = (f"{r['median_ms']:.1f} ({r['spread_ms']:.1f})  {r['ratio']:.2f}x" for r in results[case].values())
        table.add_row(case, *cells)
    Console(width=120).print(machine, table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
