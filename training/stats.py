# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Measure during training how much the two maps of differential heads differ."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel, Trainer, TrainerCallback
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaAttention, eager_attention_forward


MEASURING = "diffllama_measuring"
"""The name under which `measuring_attention` is registered in transformers."""


def signals_and_noise(heads: torch.Tensor, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split heads [b, H, …] in groups of r signals and their noise into signals and each signal's noise, [b, s, …]."""
    groups = heads.unflatten(1, (-1, r + 1))
    return groups[:, :, :r].flatten(1, 2), groups[:, :, r:].expand(-1, -1, r, -1, -1).flatten(1, 2)


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute the part of each row of A1 [..., n, m] that λ·A2 cancels, Σ min(A1, λ·A2): [..., n]."""
    return torch.minimum(first, second).clamp(min=0).sum(-1)


def measuring_attention(
    module: DiffLlamaAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    differential_lambda: torch.Tensor,
    report: Callable[[dict[str, float]], None],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute eager attention and report the layer's values of `differential_stats`."""
    kwargs |= {"output_attentions": True, "output_softmax_maps": True}  # peft passes the former
    output, maps = eager_attention_forward(
        module, query, key, value, attention_mask, differential_lambda=differential_lambda, **kwargs
    )
    assert maps is not None
    r = module.signals_per_noise
    weight = differential_lambda if differential_lambda.dim() == 1 else differential_lambda.transpose(1, 2)
    first, second = signals_and_noise(maps, r)
    q1, q2 = signals_and_noise(query, r)
    if module.diff_variant == "v1":  # without the padding
        q1, q2 = q1[..., : module.map_dim], q2[..., module.map_dim :]
    report(
        {
            "cosine": F.cosine_similarity(q1.float(), q2.float(), dim=-1).mean().item(),
            "lambda": differential_lambda.mean().item(),
            "map_overlap": overlap(first, weight * second).mean().item(),
        }
    )
    return output, None


AttentionInterface.register(MEASURING, measuring_attention)
AttentionMaskInterface.register(MEASURING, eager_mask)


@contextmanager
def measuring(model: torch.nn.Module) -> Iterator[None]:
    """Make the differential model in `model` use `measuring_attention`, in evaluation mode."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    model_type = getattr(getattr(inner, "config", None), "model_type", type(model).__name__)
    if inner is None or model_type != DiffLlamaConfig.model_type:
        raise ValueError(
            f"The model must be a differential Llama (`{DiffLlamaConfig.model_type}`), got `{model_type}`."
        )
    implementation = inner.config._attn_implementation
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    inner.set_attn_implementation(MEASURING)
    try:
        yield
    finally:
        inner.set_attn_implementation(implementation)
        for module in in_training:
            module.training = True


@torch.no_grad()
def differential_stats(model: torch.nn.Module, input_ids: torch.Tensor) -> dict[str, list[float]]:
    """Measure how much the two maps of each layer's heads differ on a text.

    Args:
        model: a differential Llama with any head, also with peft, DDP or FSDP (call it on every process then).
        input_ids: token ids [b, n] without padding. Memory is that of one layer's maps, [b, H, n, n]; a few hundred
            tokens suffice.

    Returns:
        One number per layer, the mean over tokens and signal heads, for each of
        `cosine`: cosine similarity of a signal's query and its noise's, after the rotation; 1 if they are parallel;
        `lambda`: λ;
        `map_overlap`: the part of the signal map that the noise map cancels, Σ min(A1, λ·A2) of each row. It is 0 if
        the maps attend to different tokens, and min(1, λ) if they are equal.

    Raises:
        ValueError: the model is not differential.
    """
    measured: list[dict[str, float]] = []
    device = next(model.parameters()).device
    with measuring(model):
        model(input_ids=input_ids.to(device), use_cache=False, report=measured.append)  # FSDP2 copies lists
    return {name: [layer[name] for layer in measured] for name in ("cosine", "lambda", "map_overlap")}


class DifferentialStatsCallback(TrainerCallback):
    """Logs the means over layers of `differential_stats` as `diff_cosine`, `diff_lambda` and `diff_map_overlap`.

    The Trainer logs them before the first step and with every loss, to its history and to every logger in `report_to`.
    The trained weights are bitwise the same as without the callback.

        trainer.add_callback(DifferentialStatsCallback(trainer, input_ids))

    Args:
        trainer: the Trainer that logs, of transformers or TRL.
        input_ids: token ids [b, n] to measure on, without padding.
    """

    def __init__(self, trainer: Trainer, input_ids: torch.Tensor) -> None:
        self.trainer = trainer
        self.input_ids = input_ids

    def log(self, model: torch.nn.Module) -> None:
        """Measure the model and log the means."""
        stats = differential_stats(model, self.input_ids)
        self.trainer.log({f"diff_{name}": fmean(layers) for name, layers in stats.items()})

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Log before the first step, unless the training is resumed."""
        if state.global_step == 0:
            self.log(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """Log with every loss."""
        if "loss" in (logs or {}):
            self.log(model)
