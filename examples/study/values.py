# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers that a study measures, and their averages over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Value:
    """A number measured on one trained model.

    Args:
        measure: what was measured, such as `accuracy by needles`.
        condition: under which condition and as which metric, such as {"needles": 24}.
        number: the value.
    """

    measure: str
    condition: Mapping[str, Any]
    number: float


def over_seeds(numbers: Sequence[float]) -> dict[str, Any]:
    """Return the numbers, their mean and, for two or more, the 95 % interval of Student's t-distribution."""
    mean = fmean(numbers)
    if len(numbers) < 2:
        return {"seeds": list(numbers), "mean": mean}
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1)) * stdev(numbers) / len(numbers) ** 0.5
    return {"seeds": list(numbers), "mean": mean, "low": mean - half, "high": mean + half}
