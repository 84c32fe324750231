"""When `diff_fused` computes a call, and that models give the same with it."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from diffllama.modeling_diff import diff_fused
from diffllama.modeling_diff.blocked_attention import packed_attention
from diffllama.modeling_diff.diff_fused import NAME, chosen
from support.attention_masks import KINDS, batch
from support.tiny_models import EVERY_FEATURE, VARIANTS, paged, tiny_model, tokens


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call by blocks had."""
    calls: list[int] = []

    def count(query: torch.Tensor, *arguments: Any, compute: Any = diff_fused.blocked_attention) -> torch.Tensor:
        calls.append(query.shape[2])
        return compute(query, *arguments)

    monkeypatch.setattr(diff_fused, "blocked_attention", count)
    return calls


QUERY = torch.zeros(2, 4, 3, 8)
PAGED = {"cache": object(), "cu_seq_lens_q": torch.tensor([0, 1, 3])}  # pages of two requests
ONE_REQUEST = {"cu_seq_lens_q": torch.tensor([0, 3])}
MASK = torch.ones(2, 1, 3, 3, dtype=torch.bool)


@pytest.mark.parametrize("mask", [None, MASK], ids=["causal", "mask"])
def test_v1s_sdpa_is_computed_by_it(mask: torch.Tensor | None) -> None:
    assert chosen("sdpa", "v1", QUERY, mask, 0.0, {"sliding_window": 4, "cache": None, "is_causal": True}) == NAME
    assert chosen("sdpa", "v1", QUERY.double(), mask, 0.0, {}) == NAME


@pytest.mark.parametrize(
    ("implementation", "variant", "query", "mask", "dropout", "options"),
    [
        pytest.param("sdpa", "v2", QUERY, None, 0.0, {}, id="v2"),
        pytest.param("eager", "v1", QUERY, None, 0.0, {}, id="eager"),
        pytest.param("flex_attention", "v1", QUERY, object(), 0.0, {}, id="flex, whose masks are no tensors"),
        pytest.param("sdpa", "v1", QUERY.bfloat16(), None, 0.0, {}, id="half precision"),
        pytest.param("sdpa", "v1", QUERY.to("meta"), None, 0.0, {}, id="no CPU"),
        pytest.param("sdpa", "v1", QUERY, MASK.float(), 0.0, {}, id="added mask"),
        pytest.param("sdpa", "v1", QUERY, MASK.expand(2, 4, 3, 3), 0.0, {}, id="mask of each head"),
        pytest.param("sdpa", "v1", QUERY, None, 0.1, {}, id="dropout"),
        pytest.param("paged|sdpa", "v1", QUERY, None, 0.0, PAGED, id="pages before transformers 5.19"),
        pytest.param("sdpa", "v1", QUERY, MASK[:, :, :1], 0.0, {}, id="mask of all queries"),
        pytest.param("sdpa", "v1", QUERY, None, 0.0, PAGED | ONE_REQUEST, id="pages, one request"),
        pytest.param("sdpa", "v2", QUERY.bfloat16(), None, 0.0, PAGED, id="pages in half precision"),
        pytest.param("paged|eager", "v1", QUERY, None, 0.0, PAGED, id="pages, eager"),
        pytest.param("sdpa", "v1", QUERY, None, 0.0, {"is_causal": False}, id="not causal"),
        pytest.param("sdpa", "v1", QUERY[:0], None, 0.0, {}, id="empty batch"),
    ],
)
def test_all_else_is_computed_by_what_is_configured(
    implementation: str,
    variant: str,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> None:
    assert chosen(implementation, variant, query, mask, dropout, options) == implementation


def test_a_call_by_autocast_is_computed_by_what_is_configured() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert chosen("sdpa", "v1", QUERY, None, 0.0, {}) == "sdpa"


def test_a_compiled_call_is_computed_by_what_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert chosen("sdpa", "v1", QUERY, None, 0.0, {}) == "sdpa"


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_can_be_asked_for_by_name(variant: str, blocked: list[int]) -> None:
    model = tiny_model(variant, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
    model(tokens(1, 5))
    assert blocked == [5] * model.config.num_hidden_layers


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fields", [{}, {"attention_dropout": 0.1}], ids=["half precision", "dropout"])
def test_where_it_cannot_compute_it_is_sdpa(variant: str, fields: dict[str, Any], blocked: list[int]) -> None:
    dtype = torch.float32 if fields else torch.bfloat16
    model = tiny_model(variant, dtype, NAME, **fields).train(bool(fields))
    losses = []
    for implementation in (NAME, "sdpa"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        losses.append(model(tokens(2, 9), labels=tokens(2, 9), use_cache=False).loss)
    assert torch.equal(*losses)
    assert blocked == []


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("fields", [{}, EVERY_FEATURE], ids=["plain", "every feature"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_generated_tokens_are_those_of_eager(
    variant: str, fields: dict[str, Any], cache: str, blocked: list[int]
) -> None:
    model, given = tiny_model(variant, attn_implementation=NAME, **fields), batch("left", 9)
    written = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        written.append(
            model.generate(
                tokens(2, 9),
                attention_mask=given.attention_mask,
                max_new_tokens=12,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            )
        )
    assert torch.equal(*written)
    assert blocked[:2] == [9, 9]
    assert set(blocked[2:]) == {1}


@pytest.mark.parametrize("variant", VARIANTS)
def test_pages_are_computed_for_both_variants(variant: str) -> None:
    assert chosen("sdpa", variant, QUERY, MASK, 0.0, PAGED | {"is_causal": False}) == NAME


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="sdpa's then; test_generation.py compares it"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_continuous_batching_computes_each_request_by_itself(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(variant, attn_implementation="sdpa", eos_token_id=None)
    prompts, seen = [tokens(n, seed=n).tolist() for n in (9, 4, 30)], []
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = [model.generate(torch.tensor([ids]), **settings)[0, -6:].tolist() for ids in prompts]
    model.generation_config.update(**settings)

    def packed(*call: Any) -> torch.Tensor:
        seen.append(len(call[4]) - 1)
        return packed_attention(*call)

    monkeypatch.setattr(diff_fused, "packed_attention", packed)
    outputs = model.generate_batch(prompts, continuous_batching_config=paged(8, 64))
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert max(seen) == 3


# --- as on a GPU: kernels in Triton's interpreter --------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the CPU taken for a GPU; how many queries each call of the kernels had."""
    if not diff_fused.HAS_TRITON:
        pytest.skip("needs triton")
    calls: list[int] = []

    def count(query: torch.Tensor, *arguments: Any, compute: Any = diff_fused.differential_flash) -> torch.Tensor:
        calls.append(query.shape[2])
        return compute(query, *arguments)

    monkeypatch.setattr(diff_fused, "differential_flash", count)
    monkeypatch.setattr(diff_fused, "on_gpu", lambda device: True)
    monkeypatch.setattr(diff_fused, "is_blocked", lambda *call: False)
    return calls


WINDOW = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize("fields", [{}, WINDOW], ids=["full", "window of 4"])
@pytest.mark.parametrize("kind", [*KINDS, "holes"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_give_the_models_logits_and_gradients(
    variant: str, kind: str, fields: dict[str, Any], kernels: list[int]
) -> None:
    model, given, input_ids = tiny_model(variant, head_dim=32, **fields), batch(kind, 13), tokens(2, 13)
    results = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        logits = model(
            input_ids, attention_mask=given.attention_mask, position_ids=given.position_ids, use_cache=False
        ).logits[given.real]
        weights = list(model.parameters())
        results.append([logits, *torch.autograd.grad(logits.square().sum(), weights)])
    assert kernels == ([] if kind == "holes" else [13, 13])  # kernels take intervals of keys
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_write_what_eager_does(variant: str, cache: str, kernels: list[int]) -> None:
    model, given = tiny_model(variant, head_dim=32, attn_implementation=NAME), batch("left", 9)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    written = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        written.append(model.generate(tokens(2, 9), attention_mask=given.attention_mask, **options))
    assert torch.equal(*written)
    assert kernels[:2] == [9, 9]
    assert set(kernels[2:]) == {1}


@pytest.mark.parametrize("padding", [None, [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]], ids=["no padding", "padding"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("first", "queries"), [(0, 6), (4, 2)])
def test_bounds_say_what_the_mask_does(
    first: int, queries: int, window: int | None, padding: list[list[int]] | None, kernels: list[int]
) -> None:
    function = sliding_window_causal_mask_function(window) if window else causal_mask_function
    attention_mask = None if padding is None else torch.tensor(padding, dtype=torch.bool)
    size = {"batch_size": 2, "q_length": queries, "kv_length": 6, "q_offset": first, "allow_is_causal_skip": False}
    mask = sdpa_mask(**size, mask_function=function, attention_mask=attention_mask)
    bounds = diff_fused.diff_fused_mask(**size, mask_function=function, attention_mask=attention_mask)
    assert mask is not None
    assert bounds is not None
    assert (bounds.dtype, bounds.shape) == (torch.int32, (2, 1, queries, 2))
    keys = torch.arange(6)
    assert torch.equal((keys >= bounds[..., :1]) & (keys < bounds[..., 1:]), mask)


HOLE = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize(
    "masking",
    [
        {"attention_mask": HOLE},
        {"mask_function": lambda b, h, q, k: (k <= q) & (k != 1), "use_vmap": True},
    ],
    ids=["padding between tokens", "a mask of the caller's own"],
)
def test_a_mask_with_holes_stays_a_mask(masking: dict[str, Any], kernels: list[int]) -> None:
    size = {"batch_size": 2, "q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}
    mask = diff_fused.diff_fused_mask(**size, **masking)
    assert mask is not None
    assert mask.dtype == torch.bool
    assert torch.equal(mask, sdpa_mask(**size, **masking))


def test_a_compiled_mask_becomes_bounds_only_where_it_cannot_have_holes(
    kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    size = {"batch_size": 2, "q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}
    masks = [diff_fused.diff_fused_mask(**size, attention_mask=mask) for mask in (None, HOLE[1:].expand(2, 5))]
    assert [mask.dtype for mask in masks if mask is not None] == [torch.int32, torch.bool]


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_leave_what_is_not_causal_to_sdpa(variant: str, kernels: list[int]) -> None:
    model, results = tiny_model(variant, head_dim=32), []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        results.append(model(tokens(2, 9), is_causal=False).logits)
    assert kernels == []
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_with_dropout_bounds_become_a_mask_of_sdpa(kernels: list[int]) -> None:
    model, given = tiny_model("v1", head_dim=32, attention_dropout=0.1).train(), batch("left", 9)
    losses = []
    for implementation in (NAME, "sdpa"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        losses.append(model(tokens(2, 9), attention_mask=given.attention_mask, labels=tokens(2, 9)).loss)
    assert torch.equal(*losses)
    assert kernels == []
