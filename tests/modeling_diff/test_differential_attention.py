import math

import pytest
import torch

from diffllama.modeling_diff.differential_attention import (
    DiffLlamaPolyNorm,
    DiffLlamaRMSNorm,
    combine_maps,
    differential_maps,
    exponential_lambda_init,
    join_keys,
    pad_queries,
    vector_lambda,
)
from support import reference


@pytest.mark.parametrize(
    ("layer", "value"), [(0, 0.2), (1, 0.3555090676), (2, 0.4707130183), (11, 0.7778700996), (27, 0.7998178765)]
)
def test_lambda_init_has_the_papers_values(layer: int, value: float) -> None:
    assert exponential_lambda_init(layer) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("r", [1, 2, 4])
def test_padded_queries_times_joined_keys_are_the_products_of_each_map(r: int) -> None:
    query, key = torch.randn(2, 5, 3 * (r + 1), 4), torch.randn(2, 5, 6, 4)
    padded, joined = pad_queries(query, r), join_keys(key)
    assert padded.shape == (2, 5, 3 * (r + 1), 8)
    assert joined.shape == (2, 5, 3, 8)
    for i in range(3 * (r + 1)):
        group, noise = i // (r + 1), i % (r + 1) == r
        product = (padded[:, :, i] * joined[:, :, group]).sum(-1)
        torch.testing.assert_close(product, (query[:, :, i] * key[:, :, 2 * group + noise]).sum(-1))
        assert torch.count_nonzero(padded[:, :, i, :4] if noise else padded[:, :, i, 4:]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_lambda_is_computed_in_float32_or_better(dtype: torch.dtype) -> None:
    q1, k1, q2, k2 = torch.randn(4, 64).to(dtype)
    value = vector_lambda(0.2, q1, k1, q2, k2)
    truth = math.exp(q1.double() @ k1.double()) - math.exp(q2.double() @ k2.double()) + 0.2
    assert value.shape == (1,)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value.item() == pytest.approx(truth, rel=1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize(
    ("signals", "noise", "lambda_shape"),
    [
        ([0, 2, 4], [1, 3, 5], (1,)),
        ([0, 2, 4], [1, 3, 5], (2, 5, 3, 1)),
        ([0, 1, 3, 4], [2, 2, 5, 5], (1,)),
        ([0, 1, 3, 4], [2, 2, 5, 5], (2, 5, 4, 1)),
    ],
    ids=["pairs, one λ", "pairs, λ per token and head", "groups of 3, one λ", "groups of 3, λ per token and head"],
)
def test_half_precision_maps_are_combined_in_float32(
    signals: list[int], noise: list[int], lambda_shape: tuple[int, ...]
) -> None:
    output = torch.randn(2, 5, 6, 8).bfloat16()
    lam = torch.rand(lambda_shape)
    combined = combine_maps(output, lam, len(signals) // len(set(noise)))
    exact = output[:, :, signals].double() - lam.double() * output[:, :, noise].double()
    assert combined.dtype == torch.bfloat16
    torch.testing.assert_close(combined, exact.float().bfloat16(), rtol=0, atol=0)


def test_equal_maps_and_half_lambda_leave_exactly_half() -> None:
    output = torch.randn(2, 5, 3, 8).bfloat16().repeat_interleave(2, dim=2)
    assert torch.equal(combine_maps(output, torch.full((1,), 0.5), 1), output[:, :, ::2] / 2)


def test_differential_maps_subtract_neighbours_for_each_query() -> None:
    maps, lam = torch.rand(2, 6, 5, 7), torch.rand(2, 5, 3, 1)
    result = differential_maps(maps, lam, 1)
    assert result.shape == (2, 3, 5, 7)
    for head in range(3):
        expected = maps[:, 2 * head] - lam[:, :, head] * maps[:, 2 * head + 1]
        torch.testing.assert_close(result[:, head], expected)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_rms_norm_is_exact_in_float64_and_has_no_weight_unless_affine(affine: bool) -> None:
    norm = DiffLlamaRMSNorm(12, eps=1e-5, elementwise_affine=affine).double()
    if affine:
        torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 12, dtype=torch.float64) * 1e-3  # so small that ε matters
    torch.testing.assert_close(norm(x), reference.rms_norm(x, norm.weight, 1e-5), rtol=1e-14, atol=0)
    assert len(list(norm.parameters())) == affine


def test_rms_norm_computes_half_precision_in_float32() -> None:
    x = torch.randn(4, 256).half() * 300  # squares overflow float16
    norm = DiffLlamaRMSNorm(256, eps=1e-5).half()
    assert norm(x).dtype == torch.float16
    torch.testing.assert_close(norm(x).double(), reference.rms_norm(x.double(), None, 1e-5), rtol=1e-3, atol=1e-4)


def test_poly_norm_has_the_published_values_and_gradients_of_its_formula() -> None:
    norm = DiffLlamaPolyNorm()
    assert torch.equal(norm.weight, torch.full((3,), 1 / 3))
    assert torch.equal(norm.bias, torch.zeros(1))
    norm.load_state_dict({"weight": torch.tensor([0.2, 0.3, 0.5]), "bias": torch.tensor([0.125])})
    published = torch.tensor([-0.5263191243, -0.1043004407, 0.125])
    torch.testing.assert_close(norm(torch.tensor([-1.5, -0.5, 0.0])), published, rtol=1e-6, atol=0)
    assert (
        norm.bfloat16()(torch.randn(2, 9).bfloat16() * 1e4).isfinite().all()
    )  # sixth powers are too large for float16

    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    inputs, direction = (x, *norm.double().parameters()), torch.randn(3, 12, dtype=torch.float64)
    truth = reference.poly_norm(x, norm.weight, norm.bias)
    torch.testing.assert_close(norm(x), truth, rtol=1e-12, atol=0)
    ours, true = (torch.autograd.grad((output * direction).sum(), inputs) for output in (norm(x), truth))
    torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-12)
