# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient norms of a differential model and its matched Transformer."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from diffllama.configuration import recipe
from diffllama.evaluation.datasets.data import Source, texts
from diffllama.evaluation.figures import COLOURS, MARKERS, finish, panels
from diffllama.evaluation.models import ModelSpec
from diffllama.evaluation.probes.model_pair import ModelPairProbe, Pair
from diffllama.evaluation.runs import Measurement, Outcome, Report
from diffllama.evaluation.settings import GradientsSettings


LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
ALL = "all parameters"
CLIP = 1.0
"""Gradients are clipped to this norm before a step, after they are measured."""


def norms(model: PreTrainedModel) -> dict[str, list[float]]:
    """Compute the norms of the gradients in attention and feed-forward, layer by layer, by part of the layer.

    A part is a projection, the head norm, or the four λ vectors together.
    """
    by_part = defaultdict(list)
    for layer in model.model.layers:
        squares: dict[str, float] = defaultdict(float)
        for name, parameter in layer.named_parameters():
            module, part, *_ = name.split(".")
            if module in ("self_attn", "mlp"):
                squares["lambda vectors" if part in LAMBDA_VECTORS else part] += parameter.grad.norm().item() ** 2
        for part, square in squares.items():
            by_part[part].append(square**0.5)
    return dict(by_part)


class Gradients(GradientsSettings, ModelPairProbe[torch.Tensor]):
    """Gradient norms at initialization and in early training, averaged over the layers.

    The paper derives that the gradients of differential attention have the magnitude of those of softmax attention, so
    that a DIFF Transformer trains with a Transformer's hyperparameters. Here both start from the same seed and see the
    same random excerpts, in float32. Token ids are bytes (vocabulary of 256). AdamW has the betas and the weight decay
    of the paper's scaling study, and a constant learning rate. Gradients are measured at steps 0, 1, 10, 100, … and the
    last one, each on the step's own batch and before clipping to norm 1.

    A resumed run trains again from the beginning, and keeps the samples that it stored.
    """

    dataset: ClassVar[str] = "novels"
    intervals: ClassVar[bool] = False

    def specs(self) -> list[ModelSpec]:
        """Return the pair of models."""
        return [self.pair("float32", vocab_size=256)]

    @property
    def measured_steps(self) -> list[int]:
        """Steps to measure: 0, the powers of ten, and the last one."""
        return [0] * (self.steps > 0) + [10**power for power in range(9) if 10**power < self.steps] + [self.steps]

    def samples(self, source: Source, loaded: Pair) -> Mapping[str, torch.Tensor]:
        """Return for each measured step the batches up to and including it: bytes [steps, batch, length].

        Raises:
            ValueError: the texts together are shorter than a sequence.
        """
        content = bytearray("\n\n".join(texts(source).values()).encode())
        if len(content) < self.length:
            raise ValueError(
                f"{source.path} has {len(content):,} bytes of text, fewer than a sequence of {self.length:,}. "
                "Name more text with --data, or lower --length."
            )
        text = torch.frombuffer(content, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(self.seed)
        starts = torch.randint(len(text) - self.length + 1, (self.steps + 1, self.batch, 1), generator=generator)
        batches = text[starts + torch.arange(self.length)]
        return {f"step {step}": batches[: step + 1] for step in self.measured_steps}

    def measure(self, loaded: Pair, samples: Mapping[str, torch.Tensor]) -> Iterator[Outcome]:
        """Train both models and measure their gradients on the way."""
        training = recipe("scaling")["training"]
        optimizers = {
            name: torch.optim.AdamW(
                model.parameters(),
                lr=self.learning_rate,
                betas=(training["adam_beta1"], training["adam_beta2"]),
                weight_decay=training["weight_decay"],
            )
            for name, model in loaded.items()
        }
        longest = max(samples.values(), key=len)
        for step, batch in enumerate(longest):
            ids = batch.long().to(self.place)
            by_model, losses = {}, {}
            for name, model in loaded.items():
                loss = model(ids, labels=ids, use_cache=False).loss
                loss.backward()
                losses[name], by_model[name] = loss.item(), norms(model)
                by_model[name][ALL] = [torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()]
                optimizers[name].step()
                optimizers[name].zero_grad()
            if f"step {step}" in samples:
                measurements = []
                for part in dict.fromkeys([*by_model["transformer"], *by_model["diff"]]):
                    values = {name: fmean(parts[part]) for name, parts in by_model.items() if part in parts}
                    if len(values) == 2:
                        values["ratio"] = values["diff"] / values["transformer"]
                    measurements.append(Measurement({"step": step, "gradient of": part}, values))
                yield Outcome(f"step {step}", measurements, {"loss": losses, "norms": by_model})

    def draw(self, report: Report, figure: Any) -> None:
        """Draw a panel for each step, with both models' norms of each part on a logarithmic axis."""
        steps = self.measured_steps
        grid = panels(figure, len(steps), rows=-(-len(steps) // 2))
        for axes in grid[1:]:
            axes.sharey(grid[0])
        for axes, step in zip(grid, steps, strict=True):
            rows = report.select(step=step)
            for index, (model, label) in enumerate(self.labels.items()):
                values = [row["models"][0].get(model, {"mean": math.nan})["mean"] for row in rows]
                axes.plot(range(len(rows)), values, MARKERS[index], color=COLOURS[index], label=label)
            axes.margins(y=0.35)  # room for the legend
            axes.set_yscale("log")
            axes.set_xticks(
                range(len(rows)), [row["condition"]["gradient of"] for row in rows], rotation=45, ha="right"
            )
            finish(axes, "", "gradient norm, mean over layers", f"step {step:,}")
