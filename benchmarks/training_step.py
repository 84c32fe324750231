# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Training steps on the CPU or a GPU: time and memory of ours, transformers' `diffllama` and the matched Llama.

Usage: python -m benchmarks.training_step [--tokens 512] [--width 768] [--layers 6] [--rounds 7] [--json FILE]

A step is forward, backward, AdamW (fused, as the Trainer's) and `zero_grad`, of two sequences. The cases are float32
and, on a GPU, autocast to bfloat16, each with and without gradient checkpointing. `benchmarks.compared.build` says what
the models have in common.

Times are medians over rounds, in which models take turns (on a GPU, of the best of ten steps in each). Before the
first, memory is measured:

    weights, optimizer    the sizes of these tensors
    step                  the most that torch has allocated at a time for a step besides: gradients, activations ...
    peak                  the sum

These are exact and the same in every run. What a process has in memory is more: libraries, what their kernels work
with, and what malloc, or torch's allocator on a GPU, keeps for later.

Before, each model's loss and gradients are compared with eager attention's, and a step must change every weight.
"""

import gc
import json
import os
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from rich.console import Console
from rich.table import Table
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from benchmarks.compared import DEVICE, NAMES, build, machine, parser, seconds, tokens


CASES = {
    f"{dtype}{', checkpointing' if checkpointing else ''}": (dtype, checkpointing)
    for dtype in (("float32", "bfloat16") if DEVICE == "cuda" else ("float32",))
    for checkpointing in (False, True)
}
"""Name -> what kernels compute in, and whether activations are computed again in the backward."""
SEQUENCES = 2
MEASURED = {"milliseconds": "ms", "step_mb": "step, MB", "peak_mb": "peak, MB"}
"""Name in the results -> in the table. The results have ratios to the Llama of each."""

Step = Callable[[], object]
Row = dict[str, float]


def backward(model: PreTrainedModel, case: str, input_ids: torch.Tensor) -> torch.Tensor:
    """Computes gradients. Returns the loss."""
    dtype, checkpointing = CASES[case]
    if checkpointing != model.is_gradient_checkpointing:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = model(input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def train(model: PreTrainedModel, optimizer: Optimizer, case: str, input_ids: torch.Tensor) -> None:
    """One step of training."""
    backward(model, case, input_ids)
    optimizer.step()
    optimizer.zero_grad()


def check(model: PreTrainedModel, optimizer: Optimizer) -> None:
    """What is timed is right: loss and gradients are eager attention's in float32, and a step changes every weight."""
    input_ids = tokens(SEQUENCES, 65)

    def computed(case: str) -> dict[str, torch.Tensor]:
        values = {"loss": backward(model, case, input_ids)}
        values |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return values

    model.set_attn_implementation("eager")
    expected = computed("float32")
    model.set_attn_implementation("sdpa")
    for case, (dtype, _) in CASES.items():
        values = computed(case)
        for name in ("loss", *(name for name, _ in model.named_parameters())):
            assert name in values, f"{case}: {name} has no gradient."
            error = (values[name] - expected[name]).norm() / expected[name].norm()  # NaN where there is one, or only 0
            assert error < (1e-3 if dtype == "float32" else 0.1), f"{case}: {name} differs from eager's by {error:.1e}."
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, "float32", input_ids)
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), f"A step does not change {name}."


def milliseconds(step: Step) -> float:
    """Wall-clock time of one step."""
    return min(seconds(step) for _ in range(10 if DEVICE == "cuda" else 1)) * 1e3


def step_mb(step: Step) -> float:
    """The most that torch has allocated at a time during a step, besides what it had before."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0)) / 1e6


def run(width: int, layers: int, length: int, rounds: int) -> tuple[dict[str, Row], dict[str, dict[str, Row]]]:
    """Checks and measures all models, in all cases. See the module's docstring."""
    input_ids, trained, models = tokens(SEQUENCES, length), {}, {}
    for name in NAMES:
        model = build(name, width, layers).train()
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        check(model, optimizer)
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        kept = {"weights_mb": list(model.parameters()), "optimizer_mb": states}
        models[name] = {what: sum(tensor.nbytes for tensor in tensors) / 1e6 for what, tensors in kept.items()}
        trained[name] = (model, optimizer)
    results: dict[str, dict[str, Row]] = {}
    for case in CASES:
        steps = {name: partial(train, *pair, case, input_ids) for name, pair in trained.items()}
        memory = {name: step_mb(step) for name, step in steps.items()}
        times = [{name: milliseconds(step) for name, step in steps.items()} for _ in range(rounds)]
        rows: dict[str, Row] = {}
        for name in NAMES:
            own = [time[name] for time in times]
            rows[name] = {"milliseconds": statistics.median(own), "spread": max(own) - min(own)}
            rows[name] |= {"step_mb": memory[name], "peak_mb": sum(models[name].values()) + memory[name]}
        for row in rows.values():
            row |= {f"{key}_ratio": row[key] / rows["llama"][key] for key in MEASURED}
        results[case] = rows
    return models, results


def main() -> None:
    """Runs the cases and prints the table."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512, help=f"tokens of each of the {SEQUENCES} sequences")
    arguments = options.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler tells when it starts and stops
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)  # newer transformers renamed them
    models, results = run(arguments.width, arguments.layers, arguments.tokens, arguments.rounds)
    table = Table("case", *NAMES, title="milliseconds, median (spread), and megabytes; ratio to llama")
    for key in ("weights_mb", "optimizer_mb"):
        table.add_row(f"{key.removesuffix('_mb')}, MB", *(f"{models[name][key]:.1f}" for name in NAMES))
    for case, rows in results.items():
        table.add_section()
        for key, label in MEASURED.items():
            spread = {name: f" ({row['spread']:.1f})" if key == "milliseconds" else "" for name, row in rows.items()}
            cells = (f"{row[key]:.1f}{spread[name]}  {row[f'{key}_ratio']:.2f}x" for name, row in rows.items())
            table.add_row(f"{case}: {label}", *cells)
    where = machine(arguments)
    Console(width=140).print(where, table)
    if arguments.json:
        report = {"machine": where, "models": models, "results": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
