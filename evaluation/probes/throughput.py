# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Throughput of a differential model and its matched Transformer, in tokens per second."""

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from diffllama.evaluation.figures import bars, finish, panels
from diffllama.evaluation.models import ModelSpec
from diffllama.evaluation.probes.model_pair import ModelPairProbe, Pair
from diffllama.evaluation.runs import Measurement, Outcome, Report
from diffllama.evaluation.settings import ThroughputSettings


PASSES = ("forward", "forward + backward")
WARM_UP = 2
"""Number of untimed warm-up steps for each length and pass."""


def step(model: PreTrainedModel, ids: torch.Tensor, name: str) -> None:
    """Run one pass, including the loss, over token ids [batch, length]."""
    with torch.inference_mode(name == "forward"):
        loss = model(ids, labels=ids, use_cache=False).loss
    if name != "forward":
        loss.backward()
        model.zero_grad()


def check(name: str, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise a `ValueError` unless the loss and every parameter's gradient are finite."""
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    tensors = (loss, *(parameter.grad for parameter in model.parameters()))
    if not all(tensor is not None and tensor.isfinite().all() for tensor in tensors):
        raise ValueError(f"The {name}'s loss or gradients are not finite in {model.dtype}. Name another --dtype.")
    model.zero_grad()


class Throughput(ThroughputSettings, ModelPairProbe[int]):
    """Tokens per second of a DIFF and its matched Transformer, both with random weights and PyTorch's SDPA.

    Both models are in memory and alternate. A sample is a round, which times each model once for every length and pass;
    every second round begins with the other model. `ratio` is the DIFF's speed divided by the Transformer's in the same
    round. A pass includes the loss, but no optimizer step. The paper times its own kernels on a GPU; ratios depend on
    kernels and hardware.
    """

    def specs(self) -> list[ModelSpec]:
        """Return the pair of models, with facts of this machine."""
        on_gpu = self.place.type == "cuda"
        pair = self.pair(("bfloat16" if on_gpu else "float32") if self.dtype == "auto" else self.dtype)
        machine = torch.cuda.get_device_name(self.place) if on_gpu else platform.processor() or platform.machine()
        return [replace(pair, facts=pair.facts | {"machine": machine, "threads": torch.get_num_threads()})]

    def samples(self, source: None, loaded: Pair) -> Mapping[str, int]:
        """Return the rounds by name."""
        return {f"round {number}": number for number in range(self.rounds)}

    def measure(self, loaded: Pair, samples: Mapping[str, int]) -> Iterator[Outcome]:
        """Check the models, warm up, and time them in turn.

        Raises:
            ValueError: a loss or gradient is not finite.
        """
        vocabulary = loaded["diff"].config.vocab_size
        generator = torch.Generator().manual_seed(self.seed)
        ids = [torch.randint(vocabulary, (self.batch, n), generator=generator).to(self.place) for n in self.length]
        conditions = [(tokens, name) for tokens in ids for name in PASSES]
        for name, model in loaded.items():
            check(name, model, ids[0])
        for tokens, name in WARM_UP * conditions:
            for model in loaded.values():
                step(model, tokens, name)
        for sample, number in samples.items():
            turn = list(loaded)[:: -1 if number % 2 else 1]
            measurements = []
            for tokens, name in conditions:
                times = {kind: self.seconds(partial(step, loaded[kind], tokens, name)) for kind in turn}
                values = {f"{kind}_tokens_per_second": tokens.numel() / times[kind] for kind in loaded}
                values["ratio"] = times["transformer"] / times["diff"]
                measurements.append(Measurement({"pass": name, "length": tokens.shape[1]}, values))
            yield Outcome(sample, measurements)

    def seconds(self, timed: Callable[[], object]) -> float:
        """Return the wall-clock time of a call in seconds."""
        self.wait()
        start = time.perf_counter()
        timed()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.place.type != "cpu":
            torch.accelerator.synchronize(self.place)

    def draw(self, report: Report, figure: Any) -> None:
        """Draw a panel for each pass, with both models' bars and their ratio at each length."""
        for axes, name in zip(panels(figure, len(PASSES)), PASSES, strict=True):
            rows = report.select(**{"pass": name})
            speeds = {
                label: [row["models"][0][f"{model}_tokens_per_second"] for row in rows]
                for model, label in self.labels.items()
            }
            ticks = [f"{row['condition']['length']:,}\n{row['models'][0]['ratio']['mean']:.2f}×" for row in rows]
            bars(axes, ticks, speeds)
            axes.margins(y=0.25)  # room for the legend
            finish(axes, "length (tokens), and DIFF's share of the Transformer's speed", "tokens per second", name)
