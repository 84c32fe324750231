import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diffllama.conversion.verification import (
    TOLERANCE,
    Outputs,
    Verification,
    compare,
    measure,
    model_outputs,
    token_ids,
    tolerance_for,
)
from support.tiny_models import VARIANTS, tiny_model


def outputs(*rows: list[float]) -> list[torch.Tensor]:
    """Outputs of one sequence, [1, n, 2], without and with a cache."""
    return [torch.tensor([rows]), torch.tensor([rows])]


EXPECTED = outputs([1.0, -8.0], [2.0, 3.0])


def measured(got: list[torch.Tensor], tolerance: float | None = 0.0) -> Verification:
    return measure(EXPECTED, got, tolerance, "logits")


# measure


def test_equal_outputs_are_equal() -> None:
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
    found = measured(outputs([1.5, -8.0], [2.0, 1.0]), 0.25)
    assert (found.max_difference, found.mean_difference, found.largest_output) == (2.0, 0.625, 8.0)
    assert (found.bit_equal, found.same_top_token, found.tolerance) == (False, 0.5, 0.25)


@pytest.mark.parametrize("cached", [False, True])
def test_outputs_with_and_without_cache_both_count(cached: bool) -> None:
    got = outputs([1.0, -8.0], [2.0, 3.0])
    got[cached][0, 1, 0] += 2
    found = measured(got)
    assert (found.max_difference, found.mean_difference, found.same_top_token) == (2.0, 0.25, 0.75)
    assert not found.bit_equal
    assert not found.passed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_differences_are_taken_in_float64(dtype: torch.dtype) -> None:
    expected, got = torch.ones(3, 4, 5, dtype=dtype), torch.ones(3, 4, 5, dtype=dtype)
    got[0, 0, 0] += torch.finfo(dtype).eps
    found = measure([expected, expected], [got, expected], 0.0, "attention outputs")
    assert found.max_difference == torch.finfo(dtype).eps
    assert (found.dtype, found.sequences, found.length) == (str(dtype)[6:], 3, 4)
    assert (found.compared, found.bit_equal) == ("attention outputs", False)


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
def test_a_promise_is_kept_or_not(difference: float, tolerance: float | None, passed: bool) -> None:
    assert measured(outputs([1.0, -8.0], [2.0 + difference, 3.0]), tolerance).passed is passed


@pytest.mark.parametrize("tolerance", [0.0, 1e9])
def test_not_a_number_is_never_verified_even_on_both_sides(tolerance: float) -> None:
    both = outputs([1.0, -8.0], [torch.nan, 3.0])
    assert not measure(both, outputs([1.0, -8.0], [torch.nan, 3.0]), tolerance, "logits").passed


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
def test_the_text_says_the_numbers_and_a_record_brings_the_verification_back(name: str) -> None:
    verification = EXAMPLES[name]
    assert str(verification) == TEXTS[name]
    record = verification.as_dict()
    assert record["passed"] is verification.passed
    assert Verification.from_dict(json.loads(json.dumps(record, allow_nan=False))) == verification


# promise


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
def test_what_is_promised(
    stored: torch.dtype, bit_equal: bool, exact: bool, dtype: torch.dtype, tolerance: float | None
) -> None:
    assert tolerance_for(stored, bit_equal, exact) == (dtype, tolerance)


# Inputs and outputs


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 128256])
@pytest.mark.parametrize(("max_length", "length"), [(1, 1), (5, 5), (32, 32), (4096, 32)])
def test_tokens_are_always_the_same_and_in_range(vocab_size: int, max_length: int, length: int) -> None:
    ids, state = token_ids(vocab_size, max_length), torch.get_rng_state()
    torch.rand(1)
    assert torch.equal(ids, token_ids(vocab_size, max_length))
    torch.set_rng_state(state)
    token_ids(vocab_size, max_length)
    assert torch.equal(torch.get_rng_state(), state)  # those of others are left alone
    assert ids.shape == (3, length)
    assert ids.min() >= 0
    assert ids.max() < vocab_size


class Recorder:
    """A model that says what it was given: tokens as logits, and how often it was called as its cache."""

    def __init__(self, max_position_embeddings: int) -> None:
        self.config = SimpleNamespace(vocab_size=97, max_position_embeddings=max_position_embeddings)
        self.calls: list[tuple[int, bool, Any]] = []

    def __call__(self, input_ids: torch.Tensor, use_cache: bool, past_key_values: Any = None) -> SimpleNamespace:
        self.calls.append((input_ids.shape[1], use_cache, past_key_values))
        return SimpleNamespace(logits=input_ids[..., None], past_key_values=len(self.calls))


@pytest.mark.parametrize(("length", "first"), [(32, 21), (5, 3), (2, 1), (1, 1)])
def test_tokens_go_in_at_once_or_one_by_one_after_the_first_two_thirds(length: int, first: int) -> None:
    whole, steps = Recorder(length), Recorder(length)
    assert torch.equal(model_outputs(whole)(False)[..., 0], token_ids(97, length))
    assert torch.equal(model_outputs(steps)(True)[..., 0], token_ids(97, length))
    assert whole.calls == [(length, False, None)]
    assert steps.calls == [(first, True, None), *((1, True, i) for i in range(1, 1 + length - first))]


@pytest.mark.parametrize("length", [1, 2, 256])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_changes_nothing(variant: str, length: int) -> None:
    compute = model_outputs(tiny_model(variant, max_position_embeddings=length))
    whole, steps = compute(False), compute(True)
    assert whole.shape == steps.shape == (3, min(32, length), 97)
    assert not whole.requires_grad
    assert (whole - steps).abs().max() <= TOLERANCE * whole.abs().max()


# compare


def loader(model: Callable[[], PreTrainedModel], refs: list[weakref.ref], alive: list[int]) -> Callable[[], Outputs]:
    """Loads a model, and counts the models that are there already."""

    def load() -> Outputs:
        alive.append(sum(ref() is not None for ref in refs))
        loaded = model()
        refs.append(weakref.ref(loaded))
        return model_outputs(loaded)

    return load


def test_one_side_at_a_time_is_in_memory() -> None:
    refs: list[weakref.ref] = []
    alive: list[int] = []
    gc.disable()  # references alone have to do
    try:
        found = compare(loader(tiny_model, refs, alive), loader(tiny_model, refs, alive), 0.0)
        assert alive == [0, 0]
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
    assert found.bit_equal
    assert (found.sequences, found.length, found.tolerance, found.compared) == (3, 32, 0.0, "logits")


@pytest.mark.parametrize("fault", [False, True], ids=["whole", "cached"])
def test_a_fault_with_or_without_cache_is_found(fault: bool) -> None:
    def side(wrong: bool | None) -> Outputs:
        return lambda cached: torch.ones(3, 32, 97) + (cached is wrong)

    assert compare(lambda: side(None), lambda: side(None), 0.0).bit_equal
    for source, result in ((None, fault), (fault, None)):
        found = compare(lambda: side(source), lambda: side(result), 0.0)  # noqa: B023 - called at once
        assert (found.max_difference, found.mean_difference, found.passed) == (1.0, 0.5, False)
