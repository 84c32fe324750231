# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What is timed is compared with plain PyTorch first."""

import re
from collections.abc import Callable, Mapping

import torch


Tensors = Mapping[str, torch.Tensor]

TOLERANCE = {"output": 1e-4, "gradient": 1e-3}
"""Largest relative error in float32."""

FACTOR = {"output": 2, "gradient": 3}
"""In lower precision: the largest error, in those of plain PyTorch in the same precision."""

CHECKED_LENGTH = 777
"""What needs whole maps in plain PyTorch is checked at this length, or at the timed one if it is less."""

SAMPLES = 12
"""In lower precision, gradients of so many inputs are compared: that of λ is one number, and one computation may have
luck."""


class CorrectnessError(Exception):
    """What should be timed computes something else."""


def errors(values: Tensors, truth: Tensors) -> dict[str, float]:
    """Relative errors |values - truth| / |truth|, Euclidean norms, by name, of all layers and inputs together.

    NaN where there is one in the values, or nothing but 0 in the truth.
    """
    squares: dict[str, list[float]] = {}
    for name, expected in truth.items():
        expected = expected.double()
        both = squares.setdefault(re.sub(r"\b\d+\b", "*", name), [0.0, 0.0])
        both[0] += (values[name].double() - expected).square().sum().item()
        both[1] += expected.square().sum().item()
    return {name: (error / norm) ** 0.5 if norm else float("nan") for name, (error, norm) in squares.items()}


def compare(kind: str, values: Tensors, truth: Tensors, plain: Tensors | None = None) -> None:
    """Compares tensors by name.

    Args:
        kind: "output" or "gradient".
        values: what should be timed computes.
        truth: plain PyTorch in float32.
        plain: the same in the precision of `values`, if that is not float32.

    Raises:
        CorrectnessError: a tensor is missing, or its error is too large. In lower precision the rounding of the values
            themselves is always allowed.
    """
    for name in truth:
        if name not in values:
            raise CorrectnessError(f"{name} has no {kind}")
    rounding = 0.0 if plain is None else torch.finfo(next(iter(plain.values())).dtype).eps
    inevitable = {} if plain is None else errors(plain, truth)
    for name, error in errors(values, truth).items():
        allowed = TOLERANCE[kind] if plain is None else FACTOR[kind] * max(inevitable[name], rounding)
        if not error <= allowed:
            raise CorrectnessError(
                f"{kind} {name} differs from plain PyTorch's by {error:.1e}, more than {allowed:.1e}"
            )


def compare_with_plain(kind: str, values: Tensors, plain: Callable[[torch.dtype], Tensors], dtype: torch.dtype) -> None:
    """`compare` with what `plain` computes in float32 and, if that is not the `dtype` of the values, in theirs too."""
    compare(kind, values, plain(torch.float32), None if dtype == torch.float32 else plain(dtype))
