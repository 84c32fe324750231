import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffllama.conversion.verification import (
    TOLERANCE,
    Verification,
    measure,
    model_outputs,
    token_ids,
    tolerance_for,
)
from support.tiny_models import VARIANTS, tiny_model


def outputs(*rows: list[float]) -> list[torch.Tensor]:
    """Return outputs of one sequence, [1, n, 2], without and with a KV cache."""
    return [torch.tensor([rows]), torch.tensor([rows])]


EXPECTED = outputs([1.0, -8.0], [2.0, 3.0])


def measured(got: list[torch.Tensor], tolerance: float | None = 0.0) -> Verification:
    return measure(EXPECTED, got, tolerance, "logits")


# measure


def test_equal_outputs_are_bit_equal() -> None:
    assert measured(outputs([1.0, -8.0], [2.0, 3.0])) == Verification(
        compared="logits",
        dtype="float32",
        sequences=1,
        length=2,
        max_difference=0.0,
        mean_difference=0.0,
        largest_output=8.0,
        bit_equal=True,
        same_top_token=1.0,
        tolerance=0.0,
        attn_implementation="sdpa",
    )


def test_differences_are_measured() -> None:
    verification = measured(outputs([1.5, -8.0], [2.0, 1.0]), 0.25)
    assert (verification.max_difference, verification.mean_difference) == (2.0, 0.625)
    assert (verification.bit_equal, verification.same_top_token, verification.tolerance) == (False, 0.5, 0.25)


@pytest.mark.parametrize("cached", [False, True])
def test_outputs_with_and_without_cache_both_count(cached: bool) -> None:
    got = outputs([1.0, -8.0], [2.0, 3.0])
    got[cached][0, 1, 0] += 2
    verification = measured(got)
    assert (verification.max_difference, verification.mean_difference) == (2.0, 0.25)
    assert (verification.bit_equal, verification.same_top_token, verification.passed) == (False, 0.75, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_differences_are_taken_in_float64(dtype: torch.dtype) -> None:
    expected, got = torch.ones(3, 4, 5, dtype=dtype), torch.ones(3, 4, 5, dtype=dtype)
    got[0, 0, 0] = -torch.finfo(dtype).eps / 4
    verification = measure([expected, expected], [got, expected], 0.0, "attention outputs")
    assert verification.max_difference == 1 + torch.finfo(dtype).eps / 4
    assert (verification.dtype, verification.sequences, verification.length) == (str(dtype)[6:], 3, 4)
    assert (verification.compared, verification.bit_equal) == ("attention outputs", False)


# passed


@pytest.mark.parametrize(
    ("difference", "tolerance", "passed"),
    [
        (0.0, 0.0, True),
        (0.0, 1e-9, True),
        (0.0, None, True),
        (2.0, 0.25, True),  # of the largest output, 8
        (2.0, 0.2499, False),
        (2.0, 0.0, False),
        (2.0, None, True),
        (torch.nan, 0.0, False),
        (torch.nan, 1e9, False),
        (torch.inf, 1e9, False),
        (torch.nan, None, False),
    ],
)
def test_differences_pass_within_the_tolerance(difference: float, tolerance: float | None, passed: bool) -> None:
    assert measured(outputs([1.0, -8.0], [2.0 + difference, 3.0]), tolerance).passed is passed


def test_nan_on_both_sides_does_not_pass() -> None:
    both = outputs([1.0, -8.0], [torch.nan, 3.0])
    assert not measure(both, both, 1e9).passed


# conversion.json and the text

EXAMPLES = {
    "equal": measured(EXPECTED),
    "within": measured(outputs([1.5, -8.0], [2.0, 1.0]), 0.25),
    "beyond": measured(outputs([1.5, -8.0], [2.0, 1.0]), 1e-5),
    "not equal": measured(outputs([1.5, -8.0], [2.0, 1.0])),
    "nothing promised": measured(outputs([1.5, -8.0], [2.0, 1.0]), None),
    "eager only": replace(measured(EXPECTED), attn_implementation="eager", sdpa_difference=0.00125),
}


NUMBERS = "max difference 2, mean 0.625, where the largest is 8; 50.0% of tokens have the same top token"
INPUTS = "Logits of 1 sequences of 2 tokens in float32, sdpa attention, with and without cache"
TEXTS = {
    "equal": f"Verified, promised: bit-equal. {INPUTS}: equal bit for bit.",
    "within": f"Verified, promised: 0.25 of the largest. {INPUTS}: {NUMBERS}.",
    "beyond": f"WRONG, promised: 1e-05 of the largest. {INPUTS}: {NUMBERS}.",
    "not equal": f"WRONG, promised: bit-equal. {INPUTS}: {NUMBERS}.",
    "nothing promised": f"NOT EXACT, a warm start for training. {INPUTS}: {NUMBERS}.",
    "eager only": (
        f"Verified under eager attention only, promised: bit-equal. {INPUTS.replace('sdpa', 'eager')}: equal bit for "
        "bit. Under sdpa attention: max difference 0.00125."
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_has_the_numbers_and_a_record_brings_the_verification_back(name: str) -> None:
    verification = EXAMPLES[name]
    assert str(verification) == TEXTS[name]
    record = verification.as_dict()
    assert record["passed"] is verification.passed
    assert Verification.from_dict(json.loads(json.dumps(record, allow_nan=False))) == verification


# tolerance_for


@pytest.mark.parametrize(
    ("stored", "bit_equal", "exact", "dtype", "tolerance"),
    [
        (torch.float64, True, True, torch.float64, TOLERANCE),  # stock models take some steps in float32
        (torch.float32, True, True, torch.float32, 0.0),
        (torch.bfloat16, True, True, torch.bfloat16, 0.0),
        (torch.float16, True, True, torch.float16, 4 * 2**-10),  # halves of tiny numbers are rounded
        (torch.float64, False, True, torch.float64, TOLERANCE),
        (torch.float32, False, True, torch.float32, TOLERANCE),
        (torch.bfloat16, False, True, torch.float32, 4 * 2**-7),  # weights are rounded, and compared in float32
        (torch.float16, False, True, torch.float32, 4 * 2**-10),
        *((dtype, True, False, torch.float32, None) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
    ],
    ids=str,
)
def test_tolerance_follows_from_dtype_and_kind_of_conversion(
    stored: torch.dtype, bit_equal: bool, exact: bool, dtype: torch.dtype, tolerance: float | None
) -> None:
    assert tolerance_for(stored, bit_equal, exact) == (dtype, tolerance)


# Inputs and outputs


@pytest.mark.parametrize("vocab_size", [1, 97, 128256])
@pytest.mark.parametrize(("max_length", "length"), [(1, 1), (5, 5), (32, 32), (4096, 32)])
def test_token_ids_are_always_the_same_and_in_range(vocab_size: int, max_length: int, length: int) -> None:
    state = torch.get_rng_state()
    ids = token_ids(vocab_size, max_length)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(ids, token_ids(vocab_size, max_length))
    assert ids.shape == (3, length)
    assert 0 <= ids.min() <= ids.max() < vocab_size


class Recorder:
    """A model that returns its tokens as logits, and the number of its calls as its KV cache."""

    def __init__(self, max_position_embeddings: int) -> None:
        self.config = SimpleNamespace(vocab_size=97, max_position_embeddings=max_position_embeddings)
        self.calls: list[tuple[int, bool, Any]] = []

    def __call__(self, input_ids: torch.Tensor, use_cache: bool, past_key_values: Any = None) -> SimpleNamespace:
        self.calls.append((input_ids.shape[1], use_cache, past_key_values))
        return SimpleNamespace(logits=input_ids[..., None], past_key_values=len(self.calls))


@pytest.mark.parametrize(("length", "first"), [(32, 21), (5, 3), (2, 1), (1, 1)])
def test_tokens_go_in_at_once_and_one_by_one_after_the_first_two_thirds(length: int, first: int) -> None:
    recorder = Recorder(length)
    for logits in model_outputs(recorder):
        assert torch.equal(logits[..., 0], token_ids(97, length))
    one_by_one = [(1, True, calls) for calls in range(2, 2 + length - first)]
    assert recorder.calls == [(length, False, None), (first, True, None), *one_by_one]


@pytest.mark.parametrize("length", [1, 2, 256])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_changes_nothing(variant: str, length: int) -> None:
    whole, steps = model_outputs(tiny_model(variant, max_position_embeddings=length))
    assert whole.shape == steps.shape == (3, min(32, length), 97)
    assert not whole.requires_grad
    assert (whole - steps).abs().max() <= TOLERANCE * whole.abs().max()
