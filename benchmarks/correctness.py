# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares outputs and gradients with plain PyTorch before anything is timed."""

import re
from collections.abc import Callable, Mapping

import torch


Tensors = Mapping[str, torch.Tensor]

TOLERANCE = {"output": 1e-4, "gradient": 1e-3}
"""Largest relative error in float32."""

FACTOR = {"output": 2, "gradient": 3}
"""In lower precision: the largest error, as a multiple of plain PyTorch's error in the same precision."""

CHECKED_LENGTH = 777
"""Longest sequence, in tokens, for checks that store whole softmax maps in plain PyTorch."""

SAMPLES = 12
"""Number of inputs whose gradients are compared in lower precision. λ's gradient is one number, which plain PyTorch may
happen to compute almost exactly for one input."""


class CorrectnessError(Exception):
    """An implementation computes wrong results."""


def errors(values: Tensors, truth: Tensors) -> dict[str, float]:
    """Compute relative errors |values - truth| / |truth| with Euclidean norms.

    Returns:
        One error per name over all layers and inputs: `*` replaces the numbers in names. It is NaN if the values have
        a NaN or the truth is 0.
    """
    squares: dict[str, list[float]] = {}
    for name, expected in truth.items():
        expected = expected.double()
        sums = squares.setdefault(re.sub(r"\b\d+\b", "*", name), [0.0, 0.0])
        sums[0] += (values[name].double() - expected).square().sum().item()
        sums[1] += expected.square().sum().item()
    return {name: (error / norm) ** 0.5 if norm else float("nan") for name, (error, norm) in squares.items()}


def compare(kind: str, values: Tensors, truth: Tensors, plain: Tensors | None = None) -> None:
    """Compare tensors by name.

    Args:
        kind: "output" or "gradient".
        values: results of the implementation.
        truth: results of plain PyTorch in float32.
        plain: results of plain PyTorch in the dtype of `values`, if that is not float32.

    Raises:
        CorrectnessError: a tensor is missing, or its error is too large. In lower precision, errors of the size of the
            dtype's rounding are always allowed.
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
    """Call `compare` with the results of `plain` in float32 and, if the values have another dtype, also in theirs.

    Raises:
        CorrectnessError: as `compare` does.
    """
    compare(kind, values, plain(torch.float32), None if dtype == torch.float32 else plain(dtype))
