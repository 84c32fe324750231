from typing import Any

import pytest
import torch

from benchmarks.implementations import (
    ARCHITECTURES,
    DIFFERENTIAL,
    SHAPE_NAMES,
    Implementation,
    Setting,
    applies,
    build,
    configuration,
    implementations,
    llama,
)
from diffllama.configuration import baseline, preset


TINY = Setting("tiny", 1, 32)
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings")
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("variant", ["v1", "v2", "v2-4to1"])
@pytest.mark.parametrize("shape", ["tiny", "small", "1b", "3b"])
def test_ours_have_the_llama_as_their_baseline(shape: str, variant: str, groups: int | None) -> None:
    theirs = llama(shape, groups)
    if not applies(variant, theirs):
        assert (shape, variant, groups) in {("tiny", "v1", 4), ("small", "v1", 4)}  # odd key counts have no pairs
        return
    ours = configuration(variant, theirs)
    theirs, matched = configuration(Implementation(variant).reference.architecture, theirs), baseline(ours)
    # with four signals per noise, our feed-forward is still the Llama's
    matched.intermediate_size = ours.intermediate_size
    assert {name: getattr(matched, name) for name in FIELDS + HEADS} == {
        name: getattr(theirs, name) for name in FIELDS + HEADS
    }
    assert matched.rope_parameters == theirs.rope_parameters


def test_papers_model_is_the_preset() -> None:
    ours, theirs = configuration("v1", llama("3b")), preset("3b")
    assert all(getattr(ours, name) == getattr(theirs, name) for name in FIELDS + HEADS)


def test_models_have_keys_and_values_of_the_same_size_and_nearly_as_many_parameters() -> None:
    models = {name: build(name, TINY) for name in ARCHITECTURES}
    for name, model in models.items():
        cache = model(torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values
        size = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
        assert size == 2 * 3 * (32 if "4to1" in name else 128)
    counts = {name: model.num_parameters() for name, model in models.items()}
    head = 32
    assert counts["transformers"] == counts["llama"] + 4 * head  # λ vectors
    assert counts["v1"] == counts["llama"] + 4 * head + 2 * head  # and the head norm
    assert counts["v2"] == counts["llama"] + 128 * 128 + 128 * 4  # the second queries, the projection of λ
    assert counts["v2-4to1"] == counts["llama-4to1"] + 128 * head + 128 * 4


def test_smollm2_has_nine_heads_so_no_pairs_and_no_fours() -> None:
    assert {found.architecture for found in implementations(Setting("smollm2-135m", 1, 8))} == {"llama", "v2"}
    assert set(SHAPE_NAMES) == {"tiny", "small", "smollm2-135m", "1b", "3b"}


def test_attention_functions_of_ours_are_compared_as_far_as_they_are_registered(
    functions: dict[str, Any],
) -> None:
    plain = [Implementation(name) for name in ARCHITECTURES]
    assert implementations(TINY) == plain
    functions["fused"] = functions["sdpa"]
    fused = {name: [Implementation(name, "fused")] * (name in DIFFERENTIAL) for name in ARCHITECTURES}
    assert implementations(TINY) == [each for one in plain for each in (one, *fused[one.architecture])]
    for name, theirs in {"v1": "llama", "v2-4to1": "llama-4to1", "llama": "llama"}.items():
        assert implementations(TINY, [name], ["fused"]) == [Implementation(theirs), *fused[name]]
    assert str(Implementation("v1", "fused")) == "ours V1, fused"


def test_names_and_heads_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown architecture 'v3'"):
        implementations(TINY, ["v3"])
    with pytest.raises(ValueError, match="Attention function 'flash_attention_2' cannot run in float32 on cpu"):
        implementations(TINY, attention=["flash_attention_2"])
    with pytest.raises(ValueError, match="4 heads of shape tiny cannot be divided into groups of 3"):
        llama("tiny", 3)
