# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Training tools specific to differential models, and pre-training with transformers' Trainer.

Training does not require this package: `Trainer`, peft, TRL and accelerate train the model as any other. It needs
`pip install '.[train]'`; each name imports only what it uses.
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from diffllama.training.lambdas import train_lambdas
    from diffllama.training.nonfinite import StopOnNonFiniteCallback
    from diffllama.training.packing import load_packed_dataset
    from diffllama.training.pretraining import last_checkpoint, pretrain
    from diffllama.training.stats import DifferentialStatsCallback, differential_stats

_HOMES = {
    "DifferentialStatsCallback": "stats",
    "StopOnNonFiniteCallback": "nonfinite",
    "differential_stats": "stats",
    "last_checkpoint": "pretraining",
    "load_packed_dataset": "packing",
    "pretrain": "pretraining",
    "train_lambdas": "lambdas",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"diffllama.training.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'diffllama.training' has no attribute {name!r}")


__all__ = [
    "DifferentialStatsCallback",
    "StopOnNonFiniteCallback",
    "differential_stats",
    "last_checkpoint",
    "load_packed_dataset",
    "pretrain",
    "train_lambdas",
]
