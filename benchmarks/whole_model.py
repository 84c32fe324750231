# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models on the CPU or a GPU: ours, transformers' `diffllama` and the matched Llama, timed in turn in one run.

Usage: python -m benchmarks.whole_model [--context 2048] [--width 768] [--layers 6] [--rounds 7] [--json FILE]

Prints times, medians over rounds (of decoding, the best of ten steps in each), and ratios to the Llama of the same
run. `benchmarks.compared.build` says what the models have in common.
"""

import json
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.compared import NAMES, build, machine, parser, seconds, tokens


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


@torch.no_grad()
def main() -> None:
    """Runs the cases and prints the table."""
    options = parser(__doc__)
    options.add_argument("--context", type=int, default=2048, help="tokens of context")
    arguments = options.parse_args()

    compared = {name: build(name, arguments.width, arguments.layers) for name in NAMES}
    check(compared)
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
    where = machine(arguments)
    Console(width=120).print(where, table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": where, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
