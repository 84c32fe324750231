"""Observed attention, compared with the maps that eager models return."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
)

from diffllama.evaluation import attention
from diffllama.evaluation.attention import AttentionCall, watched
from support.attention_masks import batch
from support.llama_checkpoints import RELATIVES, SIZES
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tokens


N = 13


def plain_model(config: Any) -> PreTrainedModel:
    """Return a model that is not differential, with random weights and eager attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


MODELS = {
    **{variant: lambda variant=variant: tiny_model(variant) for variant in VARIANTS},
    "v1, a key/value head each": lambda: tiny_model("v1", num_key_value_heads=4),
    **{
        f"{variant}, every feature": lambda variant=variant: tiny_model(variant, **EVERY_FEATURE)
        for variant in VARIANTS
    },
    "v1, window": lambda: tiny_model("v1", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "v2, window": lambda: tiny_model("v2", sliding_window=4, layer_types=["full_attention", "sliding_attention"]),
    "v1, float64": lambda: tiny_model("v1", torch.float64),
    "v2, float64": lambda: tiny_model("v2", torch.float64),
    "llama": lambda: plain_model(LlamaConfig(**SIZES)),
    "llama, a key/value head each": lambda: plain_model(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "mistral, window": lambda: plain_model(RELATIVES["mistral-window"][0](**SIZES | {"sliding_window": 4})),
}
"""Name -> an eager model of two layers."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make two rows of 13 tokens take three blocks with eight maps, and two with four maps."""
    monkeypatch.setattr(attention, "BLOCK_BYTES", 5 * 4 * 2 * 8 * N)


def assert_close(ours: torch.Tensor, true: torch.Tensor, errors: int = 50) -> None:
    """Check equality up to rounding. Scores of tiny models reach 15; their error is the relative error of maps."""
    eps = torch.finfo(true.dtype).eps
    torch.testing.assert_close(ours, true, rtol=4 * errors * eps, atol=errors * eps)


def whole(call: AttentionCall, kind: str = "maps") -> torch.Tensor:
    """Join the maps of all blocks."""
    return torch.cat([getattr(call, kind)(rows) for rows in call.blocks()], dim=2)


def seen(model: PreTrainedModel, kind: str, *inputs: Any, **more: Any) -> list[torch.Tensor]:
    """Return the attention calls of each layer in one forward."""
    found: dict[int, torch.Tensor] = {}

    def look(call: AttentionCall) -> None:
        assert call.layer not in found
        found[call.layer] = whole(call, kind)

    with torch.no_grad(), watched(model, look):
        model(*inputs, **more)
    return [found[layer] for layer in range(2)]


@pytest.mark.parametrize("kind", ["causal", "left", "right"])
def test_maps_are_those_that_eager_returns(model: PreTrainedModel, kind: str) -> None:
    given, ids = batch(kind, N), tokens(2, N)
    inputs = {"attention_mask": given.attention_mask, "position_ids": given.position_ids}
    theirs = model(ids, **inputs, output_attentions=True).attentions
    for ours, true in zip(seen(model, "maps", ids, **inputs), theirs, strict=True):
        assert ours.dtype == true.dtype == model.dtype
        ours, true = (maps.transpose(1, 2)[given.real] for maps in (ours, true))  # maps of padding are arbitrary
        assert_close(ours, true)


@pytest.mark.parametrize("variant", VARIANTS)
def test_softmax_maps_are_those_that_eager_returns(variant: str) -> None:
    model, ids = tiny_model(variant), tokens(2, N)
    theirs = model(ids, output_attentions=True, output_softmax_maps=True).attentions
    for ours, true in zip(seen(model, "softmax_maps", ids), theirs, strict=True):
        assert_close(ours, true)


def test_logits_of_half_precision_are_not_rounded_to_it() -> None:
    model, ids = tiny_model("v1", torch.bfloat16), tokens(1, N)
    exact = seen(tiny_model("v1", torch.bfloat16), "logits", ids)[0]
    assert exact.dtype == torch.float32
    assert (exact != exact.bfloat16()).any()
    rounded = [logits.softmax(-1) for logits in seen(model, "softmax_maps", ids)]
    assert all(maps.dtype == torch.float32 for maps in rounded)


def test_maps_with_a_cache_are_the_last_rows(model: PreTrainedModel) -> None:
    ids, cache = tokens(1, N), DynamicCache(config=model.config)
    model(ids[:, :9], past_key_values=cache)
    ours = seen(model, "maps", ids[:, 9:], past_key_values=cache)
    for maps, true in zip(ours, model(ids, output_attentions=True).attentions, strict=True):
        keys = maps.shape[-1]  # the cache of a sliding window has no others
        assert_close(maps, true[:, :, 9:, -keys:])
        assert keys == N or true[:, :, 9:, :-keys].abs().max() == 0


@pytest.mark.parametrize("kind", ["causal", "left"])
def test_outputs_do_not_change(model: PreTrainedModel, kind: str) -> None:
    """This holds for observed calls, and for outputs computed from the observed maps."""

    def replace(call: AttentionCall) -> torch.Tensor:
        return torch.cat([call.output(call.softmax_maps(rows)) for rows in call.blocks()], dim=1)

    given, ids = batch(kind, N), tokens(2, N)
    true = model(ids, attention_mask=given.attention_mask, position_ids=given.position_ids).logits
    for function in (lambda call: None, replace):
        with watched(model, function):
            ours = model(ids, attention_mask=given.attention_mask, position_ids=given.position_ids).logits
        assert_close(ours[given.real], true[given.real], 500)


def test_returned_tensor_replaces_the_output() -> None:
    model, ids = tiny_model(), tokens(1, N)
    with watched(model, lambda call: torch.zeros_like(call.query).transpose(1, 2)):
        nothing = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    torch.testing.assert_close(nothing, model(ids).logits)
    assert not torch.allclose(nothing, tiny_model()(ids).logits)


@pytest.mark.parametrize(("block_bytes", "rows"), [(1, 1), (4 * 3 * 2 * 11, 1), (4 * 3 * 2 * 11 * 4, 4), (2**26, 7)])
def test_blocks_cover_all_rows_and_are_bounded(block_bytes: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are three sequences, two heads, 7 queries and 11 keys."""
    monkeypatch.setattr(attention, "BLOCK_BYTES", block_bytes)
    key = torch.zeros(3, 1, 11, 4)
    query = torch.zeros(3, 2, 7, 4)
    call = AttentionCall(module=torch.nn.Identity(), query=query, key=key, value=key, scaling=1.0)
    blocks = list(call.blocks())
    assert [row for block in blocks for row in range(7)[block]] == list(range(7))
    assert max(block.stop - block.start for block in blocks) == rows
    assert all(call.logits(block).nbytes <= max(block_bytes, 4 * 3 * 2 * 11) for block in blocks)


def test_query_attends_causally_without_mask() -> None:
    """Queries 2 and 3 of four with scores of 0 have thirds, then quarters."""
    query, key = torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 4, 2)
    value = torch.tensor([[3.0, 0], [3, 0], [3, 0], [3, 12]])[None, None]
    call = AttentionCall(module=torch.nn.Identity(), query=query, key=key, value=value, scaling=1.0)
    maps = call.maps(slice(0, 2))
    torch.testing.assert_close(maps[0, 0], torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4]))
    torch.testing.assert_close(call.output(maps)[0, :, 0], torch.tensor([[3.0, 0], [3, 3]]))


@pytest.mark.parametrize("fails", [False, True])
def test_watched_model_is_restored_afterwards(fails: bool) -> None:
    def look(call: AttentionCall) -> None:
        calls.append(call.layer)
        if fails and call.layer == 1:
            raise RuntimeError("too much")

    model, ids = tiny_model(attn_implementation="sdpa"), tokens(1, N)
    true, calls = model(ids).logits, list[int]()
    with pytest.raises(RuntimeError) if fails else nullcontext(), watched(model, look):
        model(ids)
    assert calls == [0, 1]
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, true)
    assert calls == [0, 1]


def test_nested_watches_see_one_after_the_other() -> None:
    model, ids, calls = tiny_model(), tokens(1, N), list[str]()
    with watched(model, lambda call: calls.append("outer")):
        with watched(model, lambda call: calls.append("inner")):
            model(ids)
        model(ids)
    assert calls == ["inner"] * 2 + ["outer"] * 2


def test_diffllama_of_transformers_is_refused_with_conversion_hint() -> None:
    model = AutoModelForCausalLM.from_config(DiffLlamaConfig(**SIZES))
    implementation = model.config._attn_implementation
    message = (
        r"`diffllama` cannot be measured\. Convert the model first: diffllama convert SRC DEST --from transformers"
    )
    with pytest.raises(ValueError, match=message), watched(model, lambda call: None):
        pytest.fail("watched")
    assert model.config._attn_implementation == implementation


def test_attention_outside_the_interface_is_refused() -> None:
    model = tiny_model()
    model._supports_attention_backend = False
    message = "`diff_llama` does not use transformers' attention interface"
    with pytest.raises(ValueError, match=message), watched(model, lambda call: None):
        pytest.fail("watched")


@pytest.mark.parametrize(
    ("config", "name"),
    [(Gemma2Config(**SIZES), "softcap"), (GptOssConfig(**SIZES, num_local_experts=2), "s_aux")],
    ids=["gemma2", "gpt-oss"],
)
def test_attention_with_softcap_or_sinks_is_refused(config: Any, name: str) -> None:
    model = plain_model(config)
    with pytest.raises(ValueError, match=f"changes its scores with `{name}`"), watched(model, lambda call: None):
        model(tokens(1, N))
    assert model.config._attn_implementation == "eager"
