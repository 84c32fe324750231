# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Training steps on the CPU or a GPU: time and memory of ours, transformers' `diffllama` and the matched Llama.

Usage: python -m benchmarks.training_step [--tokens 512] [--width 768] [--layers 6] [--rounds 7] [--json FILE]

A step is forward, backward, AdamW (fused, as the Trainer's) and `zero_grad`, of two sequences. Each model lives in a
process of its own; one steps at a time, in turn, in one run. The cases are float32 and, on a GPU, autocast to
bfloat16, each with and without gradient checkpointing. `benchmarks.compared.build` says what the models have in common.

Times are medians over rounds (on a GPU, of the best of ten steps in each). An uncounted round comes first, which
measures memory:

    weights, optimizer    the sizes of these tensors
    step                  the most that a step needs besides them: gradients, activations, what kernels work with
                          (on a GPU what torch has allocated; on the CPU what of the process is in memory, Linux only)
    peak                  the sum

Before, each model's loss and gradients are compared with eager attention's, and a step must change every weight.
"""

import ctypes
import gc
import json
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from benchmarks.compared import DEVICE, NAMES, build, machine, parser, seconds, tokens
from benchmarks.conversion import peak_mb


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


@cache
def made(name: str, width: int, layers: int) -> tuple[PreTrainedModel, Optimizer]:
    """A model and its optimizer, the same ones at every call in a process."""
    model = build(name, width, layers).train()
    return model, AdamW(model.parameters(), lr=1e-4, fused=True)


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
    """The most memory that a step needs besides what there is before."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    ctypes.CDLL(None).malloc_trim(0)  # gives back what was freed
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = peak_mb()
    step()
    return peak_mb() - before


def prepare(name: str, width: int, layers: int) -> Row:
    """Makes and checks a model in this process. Returns the sizes of its weights and of its optimizer's state."""
    warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)  # newer transformers renamed them
    model, optimizer = made(name, width, layers)
    check(model, optimizer)
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    kept = {"weights_mb": list(model.parameters()), "optimizer_mb": states}
    return {what: sum(tensor.nbytes for tensor in tensors) / 1e6 for what, tensors in kept.items()}


def measure(how: Callable[[Step], float], name: str, width: int, layers: int, case: str, length: int) -> float:
    """Measures a step of a model that was prepared in this process."""
    return how(partial(train, *made(name, width, layers), case, tokens(SEQUENCES, length)))


def run(width: int, layers: int, length: int, rounds: int) -> tuple[dict[str, Row], dict[str, dict[str, Row]]]:
    """Checks and measures all models, in all cases. See the module's docstring."""
    with ExitStack() as stack:
        spawn = get_context("spawn")
        processes = {name: stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)) for name in NAMES}

        def each(how: Callable[[Step], float], case: str) -> Row:
            return {
                name: process.submit(measure, how, name, width, layers, case, length).result()
                for name, process in processes.items()
            }

        prepared = {name: process.submit(prepare, name, width, layers) for name, process in processes.items()}
        models = {name: future.result() for name, future in prepared.items()}
        results: dict[str, dict[str, Row]] = {}
        for case in CASES:
            memory = each(step_mb, case)
            times = [each(milliseconds, case) for _ in range(rounds)]
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
