"""The attention function `diff_attention`: models that use it, and their unchanged outputs."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.masking_utils import sdpa_mask

from diffllama import DiffLlamaForCausalLM, attention, kernels
from diffllama.modeling_diff.modeling_diffllama import DIFF_ATTENTION
from support.attention_masks import batch
from support.tiny_models import EVERY_FEATURE, VARIANTS, paged, tiny_config, tiny_model, tokens


GROUPED = {"num_attention_heads": 8, "num_noise_heads": 2}
"""Fields with which a tiny model has two groups of three signals."""


def counted(monkeypatch: pytest.MonkeyPatch, function: str) -> list[int]:
    """Numbers of queries of the calls of a kernel."""
    calls: list[int] = []
    compute = getattr(kernels, function)

    def count(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return compute(query, *arguments)

    monkeypatch.setattr(kernels, function, count)
    return calls


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of queries of the calls of the CPU kernel."""
    return counted(monkeypatch, "blocked_attention")


@pytest.mark.parametrize(("variant", "expected"), [("v1", DIFF_ATTENTION), ("v2", "sdpa")])
def test_default_is_diff_attention_in_v1_and_sdpa_in_v2(variant: str, expected: str, blocked: list[int]) -> None:
    model = DiffLlamaForCausalLM(tiny_config(variant))
    assert model.config._attn_implementation == expected
    model(tokens(1, 5))
    assert blocked == ([5, 5] if variant == "v1" else [])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", DIFF_ATTENTION])
def test_attention_function_asked_for_is_used(implementation: str, variant: str, blocked: list[int]) -> None:
    model = DiffLlamaForCausalLM._from_config(tiny_config(variant), attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    model(tokens(1, 5))
    assert blocked == ([5, 5] if implementation == DIFF_ATTENTION else [])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fields", [{}, {"attention_dropout": 0.1}], ids=["half precision", "dropout"])
def test_what_it_does_not_compute_is_sdpas(variant: str, fields: dict[str, Any], blocked: list[int]) -> None:
    dtype = torch.float32 if fields else torch.bfloat16
    model = tiny_model(variant, dtype, DIFF_ATTENTION, **fields).train(bool(fields))
    losses = []
    for implementation in (DIFF_ATTENTION, "sdpa"):
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
    model, given = tiny_model(variant, **fields), batch("left", 9)
    written = []
    for implementation in (DIFF_ATTENTION, "eager"):
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


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="continuous batching is paged|sdpa's")
@pytest.mark.parametrize(
    ("implementation", "fields"),
    [(DIFF_ATTENTION, {}), (DIFF_ATTENTION, GROUPED), ("sdpa", {})],
    ids=["diff_attention", "grouped", "sdpa"],
)
def test_continuous_batching_uses_the_models_attention_function(
    implementation: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("v1", attn_implementation=implementation, eos_token_id=None, **fields)
    prompts = [tokens(n, seed=n).tolist() for n in (9, 4, 30)]
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = [model.generate(torch.tensor([ids]), **settings)[0, -6:].tolist() for ids in prompts]
    model.generation_config.update(**settings)
    calls = counted(monkeypatch, "varlen_attention")
    outputs = model.generate_batch(prompts, continuous_batching_config=paged(8, 64))
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert bool(calls) == (implementation == DIFF_ATTENTION)
    assert model.config._attn_implementation == implementation


# --- as on a GPU: kernels in Triton's interpreter --------------------------------------------------------------------


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, patched_once: None) -> list[int]:
    """Numbers of queries of the Triton kernels' calls, with the CPU in place of a GPU."""
    if not kernels.HAS_TRITON:
        pytest.skip("needs triton")
    monkeypatch.setattr(kernels, "runs_triton", lambda device: True)
    monkeypatch.setattr(kernels, "supports_blocked", lambda *call: False)
    return counted(monkeypatch, "triton_attention")


WINDOW = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("variant", "kind", "fields"),
    [
        ("v1", "causal", {}),
        ("v1", "left", WINDOW),
        ("v1", "packed", {}),
        ("v1", "holes", {}),
        ("v2", "right", WINDOW),
        ("v1", "left", GROUPED),
        ("v2", "causal", GROUPED),
    ],
)
def test_triton_gives_eagers_logits_and_gradients(
    variant: str, kind: str, fields: dict[str, Any], triton: list[int]
) -> None:
    model, given, input_ids = tiny_model(variant, head_dim=32, **fields), batch(kind, 13), tokens(2, 13)
    results = []
    for implementation in (DIFF_ATTENTION, "eager"):
        model.set_attn_implementation(implementation)
        logits = model(
            input_ids, attention_mask=given.attention_mask, position_ids=given.position_ids, use_cache=False
        ).logits[given.real]
        weights = list(model.parameters())
        results.append([logits, *torch.autograd.grad(logits.square().sum(), weights)])
    assert triton == ([] if kind == "holes" else [13, 13])  # kernels require intervals of keys
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize(("variant", "cache"), [("v1", "static"), ("v2", "dynamic")])
def test_triton_generates_eagers_tokens(variant: str, cache: str, triton: list[int]) -> None:
    model, given = tiny_model(variant, head_dim=32), batch("left", 9)
    options = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    written = []
    for implementation in (DIFF_ATTENTION, "eager"):
        model.set_attn_implementation(implementation)
        written.append(model.generate(tokens(2, 9), attention_mask=given.attention_mask, **options))
    assert torch.equal(*written)
    assert triton[:2] == [9, 9]
    assert set(triton[2:]) == {1}


SIZE = {"batch_size": 2, "q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}
HOLE = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("masking", "becomes"),
    [
        ({}, torch.int32),
        ({"attention_mask": HOLE[1:].expand(2, 5)}, torch.int32),
        ({"attention_mask": HOLE}, torch.bool),
        ({"mask_function": lambda b, h, q, k: (k <= q) & (k != 1), "use_vmap": True}, torch.bool),
    ],
    ids=["causal", "padding", "padding between tokens", "a mask of the caller's own"],
)
def test_gpus_mask_becomes_intervals_unless_it_has_holes(
    masking: dict[str, Any], becomes: torch.dtype, triton: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = attention.diff_attention_mask(**SIZE, **masking)
    assert mask is not None
    assert mask.dtype == becomes
    if becomes == torch.bool:
        assert torch.equal(mask, sdpa_mask(**SIZE, **masking))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # compiled code cannot look for holes
    compiled = attention.diff_attention_mask(**SIZE, **masking)
    assert compiled is not None
    assert compiled.dtype == (torch.bool if masking else torch.int32)


@pytest.mark.parametrize(
    ("fields", "options"),
    [({"attention_dropout": 0.1}, {}), ({}, {"is_causal": False})],
    ids=["dropout", "not causal"],
)
def test_intervals_become_sdpas_mask_again(fields: dict[str, Any], options: dict[str, Any], triton: list[int]) -> None:
    model, given = tiny_model("v1", head_dim=32, **fields).train(), batch("left", 9)
    losses = []
    for implementation in (DIFF_ATTENTION, "sdpa"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        ids = tokens(2, 9)
        losses.append(model(ids, attention_mask=given.attention_mask, labels=ids, **options).loss)
    assert torch.equal(*losses)
    assert triton == []
