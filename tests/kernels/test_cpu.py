"""Outputs and every gradient of attention in blocks, compared with plain PyTorch."""

import math

import pytest
import torch

from diffllama.kernels import cpu as module
from diffllama.kernels.cpu import blocked_attention, varlen_attention
from support.padded_queries import padding
from support.reference import joined_attention


pytestmark = pytest.mark.slow  # and independent of transformers' version
SCALING = 0.3
SHAPES = [
    (2, 1, 1, 13, 13), (2, 3, 1, 13, 13), (2, 3, 1, 5, 13), (2, 3, 1, 1, 13),
    (2, 1, 2, 13, 13), (1, 2, 4, 5, 13), (2, 3, 4, 1, 13),
]  # fmt: skip
"""Key/value heads, groups for each, signals of a group, queries, keys."""

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def call(
    variant: str, key_value_heads: int, groups: int, r: int, n: int, m: int, *, dtype: torch.dtype = torch.float64,
    batch: int = 2,
) -> Call:  # fmt: skip
    """Return queries, keys, values and λ in the model's layout, D = 16, as views of other tensors."""
    draw = torch.Generator().manual_seed(0)
    noise_heads = key_value_heads * groups

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw).to(dtype)

    query = normal(batch, n, noise_heads * (r + 1), 16).transpose(1, 2)
    if variant == "v1":
        query.masked_fill_(padding(*query.shape[1::2], r), 0)
    key, value = normal(batch, m, key_value_heads, 16).transpose(1, 2), normal(batch, key_value_heads, m + 3, 20)
    lambdas = normal(1) if variant == "v1" else normal(batch, n, noise_heads * r, 1)
    tensors = (query, key, value[:, :, :m, :16], lambdas)
    return tuple(tensor.requires_grad_() for tensor in tensors)  # type: ignore[return-value] # there are four


def all_maps(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lambdas: torch.Tensor,
    mask: torch.Tensor | None,
    r: int = 1,
) -> torch.Tensor:
    """Compute the reference."""
    return joined_attention(query, key, value, lambdas, mask, SCALING, r)


def mask_of(kind: str, n: int, m: int) -> torch.Tensor | None:
    """Return the keys that each query sees: equal for all rows of a batch (window), or not (padding)."""
    causal = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    if kind == "window":
        return (causal & ~causal.tril(-4))[None, None]
    if kind == "padding":
        hidden = torch.arange(m) < torch.tensor([0, m - n])[:, None]
        return causal & ~hidden[:, None, None]
    return None


@pytest.mark.parametrize("blocks", ["small", "whole"])
@pytest.mark.parametrize("kind", ["causal", "window", "padding"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_outputs_and_every_gradient_are_those_of_all_maps(
    variant: str, shape: tuple[int, int, int, int, int], kind: str, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks == "small":
        monkeypatch.setattr(module, "ROWS", 4)
        monkeypatch.setattr(module, "BLOCK", 1)
    tensors, mask, r = call(variant, *shape), mask_of(kind, *shape[3:]), shape[2]
    options = mask, {"v1": 8, "v2": 16}[variant], SCALING, r
    truth, ours = all_maps(*tensors, mask, r), blocked_attention(*tensors, *options)
    with torch.no_grad():  # without gradients a single query takes another path
        torch.testing.assert_close(blocked_attention(*tensors, *options), truth, rtol=1e-12, atol=1e-12)
    weights = torch.randn(truth.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    true_gradients, gradients = (torch.autograd.grad((output * weights).sum(), tensors) for output in (truth, ours))
    if variant == "v1":  # gradients of the padding, which is not read
        padded = padding(*tensors[0].shape[1::2], r)
        assert not (gradients[0] * padded).any()
        true_gradients[0].masked_fill_(padded, 0)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    for gradient, true_gradient in zip(gradients, true_gradients, strict=True):
        torch.testing.assert_close(gradient, true_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("short", [0, 8, 512])
@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("variant", ["v1", "v2"])
@torch.no_grad()
def test_sequences_that_follow_one_another_do_not_see_each_other(
    variant: str, r: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHORT", short)
    lengths = [(1, 9), (5, 5), (0, 0), (4, 13), (1, 1), (1, 7)]  # queries, keys
    calls = [call(variant, 2, 3, r, n, m, batch=1) for n, m in lengths]
    query, key, value = (torch.cat([each[i] for each in calls], dim=2) for i in range(3))
    lambdas = calls[0][3] if variant == "v1" else torch.cat([each[3] for each in calls], dim=1)
    ends = [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths, strict=True)]
    query = torch.cat((query, query[:, :, :2]), dim=2)  # two more, which belong to no sequence
    padded = lambdas if variant == "v1" else torch.cat((lambdas, lambdas[:, :2]), dim=1)
    rest = padded, *ends, {"v1": 8, "v2": 16}[variant], SCALING, r
    ours = varlen_attention(query, key, value, *rest)
    truth = torch.cat([all_maps(*each[:3], lambdas if variant == "v1" else each[3], None, r) for each in calls], dim=1)
    torch.testing.assert_close(ours[:, :12], truth, rtol=1e-12, atol=1e-12)
    assert not ours[:, 12:].any()
    key[:, :, :9], value[:, :, :9] = math.nan, math.nan
    assert torch.equal(varlen_attention(query, key, value, *rest)[:, 1:], ours[:, 1:])


@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_float32_loses_at_most_twice_what_all_maps_lose(variant: str, r: int) -> None:
    truth = all_maps(*call(variant, 2, 2, r, 65, 65), None, r)
    single = call(variant, 2, 2, r, 65, 65, dtype=torch.float32)
    ours = blocked_attention(*single, None, {"v1": 8, "v2": 16}[variant], SCALING, r)
    assert (ours - truth).norm() <= 2 * (all_maps(*single, None, r) - truth).norm()


@pytest.mark.parametrize("r", [1, 2])
def test_padding_of_queries_is_not_read(r: int) -> None:
    query, *others = call("v1", 2, 1, r, 5, 5)
    expected = blocked_attention(query, *others, None, 8, SCALING, r)
    query = query.masked_fill(padding(*query.shape[1::2], r), math.nan)
    assert torch.equal(blocked_attention(query, *others, None, 8, SCALING, r), expected)


@pytest.mark.parametrize("n", [1, 5])
def test_query_that_sees_nothing_disturbs_no_other(n: int) -> None:
    tensors = call("v1", 2, 1, 1, n, 5)
    nothing = torch.ones(2, 1, n, 5, dtype=torch.bool)
    nothing[1, :, 0] = False
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            ours = blocked_attention(*tensors, nothing, 8, SCALING, 1)
        assert ours.isfinite().all()
        torch.testing.assert_close(ours[0], all_maps(*tensors, nothing)[0], rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(blocked_attention(*tensors, nothing, 8, SCALING, 1)[0].sum(), tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_nan_is_not_hidden() -> None:
    query, key, value, lambdas = call("v1", 1, 1, 1, 5, 5)
    value = value.detach().clone()
    value[:, :, 3] = math.nan
    assert blocked_attention(query, key, value, lambdas, None, 8, SCALING, 1)[:, 3:].isnan().all()


def test_gradients_of_gradients_are_refused() -> None:
    tensors = call("v1", 1, 1, 1, 3, 3)
    output = blocked_attention(*tensors, None, 8, SCALING, 1)
    (gradient,) = torch.autograd.grad(output.sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match='Use attn_implementation="eager"'):
        gradient.sum().backward()


def test_functional_gradients_are_the_same() -> None:
    query, *others = call("v2", 1, 2, 1, 5, 5)

    def total(query: torch.Tensor) -> torch.Tensor:
        return blocked_attention(query, *others, None, 16, SCALING, 1).square().sum()

    (expected,) = torch.autograd.grad(total(query), query)
    assert torch.equal(torch.func.grad(total)(query.detach()), expected)
