# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the outputs of a converted model with those of its source."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel


TOLERANCE = 1e-5
"""Tolerance in float32, as a fraction of the largest output, of exact conversions that are not bit-equal."""


@dataclass(frozen=True)
class Verification:
    """Comparison of the outputs of source and result.

    Attributes:
        compared: name of the outputs, such as "logits".
        dtype: dtype of the computation of both.
        sequences, length: numbers of inputs and of tokens in each. Each is run with and without a KV cache.
        max_difference, mean_difference: absolute, over all outputs.
        largest_output: the largest absolute output of the source.
        bit_equal: whether all outputs are equal, bit for bit.
        same_top_token: the fraction of tokens with the same largest output.
        tolerance: the largest allowed difference, as a fraction of `largest_output`; `None` allows any.
        attn_implementation: the attention implementation of both, "sdpa" or "eager".
        sdpa_difference: `max_difference` under "sdpa", if only "eager" is within the tolerance.
    """

    compared: str
    dtype: str
    sequences: int
    length: int
    max_difference: float
    mean_difference: float
    largest_output: float
    bit_equal: bool
    same_top_token: float
    tolerance: float | None
    attn_implementation: str
    sdpa_difference: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; without one, whether it is finite."""
        if self.tolerance is None:
            return math.isfinite(self.max_difference)
        return self.bit_equal or self.max_difference <= self.tolerance * self.largest_output  # False for NaN

    def as_dict(self) -> dict[str, Any]:
        """Return the record for conversion.json."""
        return asdict(self) | {"passed": self.passed}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Verification":
        """Read the dictionary that `as_dict` returned."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})

    def __str__(self) -> str:
        if self.bit_equal:
            difference = "equal bit for bit"
        else:
            difference = (
                f"max difference {self.max_difference:.3g}, mean {self.mean_difference:.3g}, where the largest is "
                f"{self.largest_output:.3g}; {self.same_top_token:.1%} of tokens have the same top token"
            )
        if self.tolerance is None:
            verdict = "NOT EXACT, a warm start for training"
        else:
            promised = f"{self.tolerance:.3g} of the largest" if self.tolerance else "bit-equal"
            only = " under eager attention only" if self.sdpa_difference is not None else ""
            verdict = f"{f'Verified{only}' if self.passed else 'WRONG'}, promised: {promised}"
        text = (
            f"{verdict}. {self.compared.capitalize()} of {self.sequences} sequences of {self.length} tokens in "
            f"{self.dtype}, {self.attn_implementation} attention"
            f"{', with and without cache' * (self.compared == 'logits')}: {difference}."
        )
        if self.sdpa_difference is None:
            return text
        return f"{text} Under sdpa attention: max difference {self.sdpa_difference:.3g}."


def token_ids(vocab_size: int, max_length: int) -> torch.Tensor:
    """Return three sequences of up to 32 random tokens, always the same: [3, n]."""
    return torch.randint(vocab_size, (3, min(32, max_length)), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def model_outputs(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the logits of a transformers model for `token_ids`: in one pass, and token by token with a KV cache."""
    ids = token_ids(model.config.vocab_size, model.config.max_position_embeddings)
    whole = model(input_ids=ids, use_cache=False).logits
    first = max(1, 2 * ids.shape[1] // 3)
    step = model(input_ids=ids[:, :first], use_cache=True)
    logits = [step.logits]
    for i in range(first, ids.shape[1]):
        step = model(input_ids=ids[:, i : i + 1], past_key_values=step.past_key_values, use_cache=True)
        logits.append(step.logits)
    return [whole, torch.cat(logits, dim=1)]


def measure(
    expected: list[torch.Tensor],
    got: list[torch.Tensor],
    tolerance: float | None,
    compared: str = "logits",
    implementation: str = "sdpa",
) -> Verification:
    """Compare outputs [sequences, n, width], each without and with a KV cache."""
    a, b = torch.cat(expected), torch.cat(got)
    difference = (a.double() - b.double()).abs()
    return Verification(
        compared=compared,
        dtype=str(a.dtype).removeprefix("torch."),
        sequences=len(expected[0]),
        length=a.shape[-2],
        max_difference=difference.max().item(),
        mean_difference=difference.mean().item(),
        largest_output=a.abs().max().item(),
        bit_equal=torch.equal(a, b),
        same_top_token=(a.argmax(-1) == b.argmax(-1)).double().mean().item(),
        tolerance=tolerance,
        attn_implementation=implementation,
    )


def tolerance_for(stored: torch.dtype, bit_equal: bool, exact: bool) -> tuple[torch.dtype, float | None]:
    """Return the dtype in which weights of dtype `stored` are verified, and the tolerance (see `Verification`).

    Args:
        bit_equal: whether float32 and bfloat16 outputs must have equal bits. (For float16 see `llama`; in float64 stock
            models compute norms and rotation in float32, and ours do not.)
        exact: whether the result computes the same function as its source.
    """
    rounding = TOLERANCE if stored.itemsize >= 4 else 4 * torch.finfo(stored).eps  # of weights that are computed
    if not exact:
        return torch.float32, None
    if bit_equal:
        return stored, 0.0 if stored in (torch.float32, torch.bfloat16) else rounding
    return torch.promote_types(stored, torch.float32), rounding
