# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Stop a training at the first NaN, before it reaches the weights."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainingArguments


def scales_losses(args: TrainingArguments) -> bool:
    """Whether the Trainer or accelerate scales losses, as fp16 requires."""
    return args.fp16 or getattr(args, "mixed_precision", None) == "fp16"


class StopOnNonFiniteCallback(TrainerCallback):
    """Stops a training at the first step with non-finite gradients, before they reach the weights.

    Without it, the Trainer continues, and logs the mean of earlier losses in place of a NaN. With DeepSpeed, which does
    not expose gradients, training stops when such a step is logged. With fp16, gradients are not checked: the loss
    scaler skips steps that overflow.

    Raises:
        FloatingPointError: from `Trainer.train`. The message names the step.
    """

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Turn off the Trainer's filter of NaN losses."""
        args.logging_nan_inf_filter = False

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Check the gradients."""
        if scales_losses(args):
            return
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not gradients:
            return
        parts = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        filled = [part for part in parts if part.numel()]  # a process may have no part of a small parameter
        finite = torch.ones((), dtype=torch.int32, device=parts[0].device)
        finite *= torch.isfinite(torch.nn.utils.get_total_norm(filled, math.inf))
        if any(isinstance(gradient, DTensor) for gradient in gradients):
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        if not finite:
            raise FloatingPointError(
                f"Step {state.global_step + 1}: the gradients are not finite (NaN or infinite). No update was "
                f"applied: the weights are those of step {state.global_step}. Check its batch, the learning rate and "
                f"mixed precision, and resume from the last checkpoint in {args.output_dir}."
            )

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Check the logged loss and gradient norm."""
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name, 0.0)
            if not (math.isfinite(value) or (scales_losses(args) and name == "grad_norm")):
                raise FloatingPointError(
                    f"Step {state.global_step}: `{name}` is {value}. The weights may not be finite. Resume from an "
                    f"earlier checkpoint in {args.output_dir}."
                )
