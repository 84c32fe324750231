"""Choice of the kernel of a call, and equality of each with the formula."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from diffllama import kernels
from diffllama.kernels import diff_attention, flash_attn_forward, key_intervals
from support.padded_queries import padding
from support.reference import joined_attention


QUERY, KEY = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 3, 8)
MASK = torch.ones(2, 1, 3, 3, dtype=torch.bool)


def computed_by_sdpa(query: torch.Tensor, mask: Any, dropout: float = 0.0, **options: Any) -> bool:
    """Tell whether `flash_attn_forward` passes a call to `sdpa`."""
    calls = []

    def sdpa(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        calls.append(args)
        return query, None

    key = KEY[: len(query)].to(query)
    given = {"scaling": 1.0, "dropout": dropout, "differential_lambda": torch.ones(1, dtype=query.dtype)} | options
    flash_attn_forward(
        SimpleNamespace(map_dim=4, signals_per_noise=1, layer_idx=0), query, key, key, mask, sdpa=sdpa, **given
    )
    return bool(calls)


@pytest.mark.parametrize("mask", [None, MASK, MASK[:1]], ids=["causal", "mask", "mask of all rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_and_float64_on_cpu_use_blocks(dtype: torch.dtype, mask: torch.Tensor | None) -> None:
    assert not computed_by_sdpa(QUERY.to(dtype), mask, sliding_window=4, cache=None, is_causal=True)


@pytest.mark.parametrize(
    ("query", "mask", "options"),
    [
        pytest.param(QUERY.bfloat16(), None, {}, id="half precision"),
        pytest.param(QUERY.to("meta"), None, {}, id="no CPU"),
        pytest.param(QUERY, MASK.float(), {}, id="added mask"),
        pytest.param(QUERY, MASK.expand(2, 4, 3, 3), {}, id="mask of each head"),
        pytest.param(QUERY, MASK[:, :, :1], {}, id="mask of all queries"),
        pytest.param(QUERY, None, {"dropout": 0.1}, id="dropout"),
        pytest.param(QUERY, None, {"is_causal": False}, id="not causal"),
        pytest.param(QUERY, None, {"position_bias": torch.zeros(1)}, id="position bias"),
        pytest.param(QUERY[:0], None, {}, id="empty batch"),
    ],
)
def test_other_calls_use_sdpa(query: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    assert computed_by_sdpa(query, mask, **options)


def test_autocast_and_compiled_calls_use_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert computed_by_sdpa(QUERY, None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert computed_by_sdpa(QUERY, None)


class Pages:
    """A paged cache of continuous batching that returns its inputs."""

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_q"]
        return key, value


@pytest.mark.parametrize(
    ("lengths", "options", "by_sdpa"),
    [
        ((0, 1, 3), {}, False), ((0, 3), {}, True), ((0, 1, 3), {"sliding_window": 2}, True),
        ((0, 1, 3), {"dropout": 0.1}, True),
    ],
    ids=["two requests", "one request", "window", "dropout"],
)  # fmt: skip
def test_continuous_batching_of_several_requests_uses_varlen(
    lengths: tuple[int, ...], options: dict[str, Any], by_sdpa: bool
) -> None:
    cu_seqlens = torch.tensor(lengths, dtype=torch.int32)
    assert computed_by_sdpa(QUERY[:1], MASK[:1], cache=Pages(), cu_seq_lens_q=cu_seqlens, **options) == by_sdpa
    assert computed_by_sdpa(QUERY[:1].bfloat16(), MASK[:1], cache=Pages(), cu_seq_lens_q=cu_seqlens, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["blocks", "sdpa"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["causal", "mask"])
@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_diff_attention_gives_the_truths_outputs_and_gradients(
    variant: str, r: int, mask: torch.Tensor | None, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 2 * r + 2, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8), (1,) if variant == "v1" else (2, 3, 2 * r, 1)
    exact = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    map_dim, padded = 4 if variant == "v1" else 8, padding(2 * r + 2, 8, r)
    if variant == "v1":
        exact[0].masked_fill_(padded, 0)
    if mask is not None:
        mask = mask.tril().index_fill(-1, torch.tensor(0), False) | torch.eye(3, dtype=torch.bool)
    given = [tensor.to(dtype if i < 3 else torch.promote_types(dtype, torch.float32)) for i, tensor in enumerate(exact)]
    given = [tensor.requires_grad_() for tensor in given]
    exact = [tensor.double().detach().requires_grad_() for tensor in given]
    truth = joined_attention(*exact, mask, map_dim**-0.5, r)
    output = diff_attention(*given, mask, map_dim=map_dim, signals_per_noise=r)
    assert output.dtype == dtype
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(output.double(), truth, **tolerance)
    weights = torch.randn(truth.shape, dtype=torch.float64, generator=draw)
    true_gradients = list(torch.autograd.grad((truth * weights).sum(), exact))
    gradients = list(torch.autograd.grad((output.double() * weights).sum(), given))
    if variant == "v1":  # the gradient of the padding is not read
        for gradient in (true_gradients[0], gradients[0]):
            gradient.masked_fill_(padded, 0)
    for gradient, true_gradient in zip(gradients, true_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), true_gradient, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["blocks", "sdpa"])
def test_without_a_mask_nothing_after_the_queries_own_keys_is_seen_unless_all_are(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 3, 8, generator=draw).to(dtype) for heads in (4, 2, 2))
    room = torch.full((2, 2, 2, 8), torch.nan, dtype=dtype)  # free slots of a static cache

    def attend(*tensors: torch.Tensor, mask: Any = None, dropout: float = 0.0, **options: Any) -> torch.Tensor:
        module = SimpleNamespace(map_dim=8, signals_per_noise=1)
        options = options | {"differential_lambda": torch.ones(1, dtype=dtype)}
        return flash_attn_forward(module, query, *tensors, mask, 1.0, dropout, **options)[0]

    causal = attend(key, value)
    assert torch.equal(attend(torch.cat((key, room), 2), torch.cat((value, room), 2)), causal)
    every = attend(key, value, mask=MASK.to(dtype) - 1)  # an additive mask: computed by sdpa
    torch.testing.assert_close(attend(key, value, is_causal=False), every)
    assert not torch.equal(attend(key, value, is_causal=False, dropout=0.5), every)


@pytest.mark.parametrize("padding", [None, [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]], ids=["no padding", "padding"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("first", "queries"), [(0, 6), (4, 2)])
def test_key_intervals_say_what_the_mask_does(
    first: int, queries: int, window: int | None, padding: list[list[int]] | None
) -> None:
    function = sliding_window_causal_mask_function(window) if window else causal_mask_function
    attention_mask = None if padding is None else torch.tensor(padding, dtype=torch.bool)
    size = {"batch_size": 2, "q_length": queries, "kv_length": 6, "q_offset": first, "allow_is_causal_skip": False}
    mask = sdpa_mask(**size, mask_function=function, attention_mask=attention_mask)
    assert mask is not None
    intervals = key_intervals(mask)
    assert intervals is not None
    assert (intervals.dtype, intervals.shape) == (torch.int32, (2, 1, queries, 2))
    keys = torch.arange(6)
    assert torch.equal((keys >= intervals[..., :1]) & (keys < intervals[..., 1:]), mask)


def test_key_intervals_of_a_mask_with_holes_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    hole = torch.tensor([True, True, False, True, True]).expand(1, 1, 5, 5)
    assert key_intervals(hole) is None
    assert key_intervals(hole.logical_not()) is not None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # compiled code cannot look for holes
    assert key_intervals(hole.logical_not()) is None
    assert key_intervals(hole.logical_not(), may_have_holes=False) is not None


@pytest.mark.parametrize(
    "mask",
    [None, MASK.tril(), MASK[:1].tril(), key_intervals(MASK.tril())],
    ids=["causal", "mask", "mask of all rows", "intervals"],
)
@pytest.mark.parametrize("r", [1, 3])
def test_gpus_masks_give_what_blocks_do(r: int, mask: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.HAS_TRITON:
        pytest.skip("needs triton")
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 3, 32, generator=draw) for heads in (2 * r + 2, 2, 2))
    given = query.masked_fill(padding(2 * r + 2, 32, r), 0), key, value, torch.rand(1, generator=draw)
    options = {"map_dim": 16, "signals_per_noise": r}
    expected = diff_attention(*given, None, **options)
    calls = []

    def count(*call: Any, compute: Any = kernels.triton_attention) -> torch.Tensor:
        calls.append(call)
        return compute(*call)

    monkeypatch.setattr(kernels, "triton_attention", count)
    monkeypatch.setattr(kernels, "runs_triton", lambda device: True)
    monkeypatch.setattr(kernels, "supports_blocked", lambda *call: False)
    torch.testing.assert_close(diff_attention(*given, mask, **options), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1
    hole = torch.tensor([True, False, True]).expand(2, 1, 3, 3)
    assert diff_attention(*given, hole, **options).isfinite().all()
    assert len(calls) == 1  # the mask with a hole was passed to SDPA
