from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.attention import Passage, last_rows
from diffllama.explorer.maps import LIMIT, MapReader
from support.tiny_models import EVERY_FEATURE, tiny_model, tiny_tokenizer


TEXT = "w7 w8 w9 w10 w11 w7 w8 w12"


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(name="tiny", model=model, tokenizer=tiny_tokenizer())


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, initializer_range=0.2, **sizes)).eval()


@pytest.mark.parametrize("fields", [{}, EVERY_FEATURE], ids=["paper", "every feature"])
@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_maps_are_those_that_the_model_returns(variant: str, fields: dict[str, Any]) -> None:
    model = tiny_model(variant, **fields)
    reader = MapReader(loaded(model))
    ids = reader.encode(TEXT)
    with torch.no_grad():
        options = {"output_attentions": True}
        signed = model(torch.tensor([ids]), **options).attentions
        softmax = model(torch.tensor([ids]), output_softmax_maps=True, **options).attentions
    overview = reader.cancelled(ids)
    r = model.config.num_attention_heads // model.config.num_noise_heads - 1
    for layer in range(2):
        for head in range(signed[layer].shape[1]):
            maps = reader.head(ids, layer, head)
            group, place = divmod(head, r)
            torch.testing.assert_close(maps.first - maps.second, signed[layer][0, head], atol=1e-5, rtol=0)
            torch.testing.assert_close(maps.first, softmax[layer][0, group * (r + 1) + place], atol=1e-5, rtol=0)
            noise = softmax[layer][0, group * (r + 1) + r]
            torch.testing.assert_close(maps.second, maps.weight[:, None] * noise, atol=1e-5, rtol=0)
            share = torch.minimum(maps.first, maps.second).clamp(min=0).sum(-1).mean().item()
            assert overview[layer][head] == pytest.approx(share, abs=1e-6)
    assert model.config._attn_implementation == "eager"


def test_a_transformer_has_one_map() -> None:
    model = tiny_llama()
    reader = MapReader(loaded(model))
    ids = reader.encode(TEXT)
    model.set_attn_implementation("eager")
    attention = model(torch.tensor([ids]), output_attentions=True).attentions
    maps = reader.head(ids, 1, 3)
    torch.testing.assert_close(maps.first, attention[1][0, 3], atol=1e-5, rtol=0)
    assert maps.second is maps.weight is None
    assert reader.cancelled(ids) == [[0, 0, 0, 0], [0, 0, 0, 0]]


def test_the_model_keeps_its_weights_and_its_attention_function() -> None:
    model = tiny_model("v2")
    reader = MapReader(loaded(model))
    copied = reader.loaded.model
    assert copied is not model
    for weight, same in zip(model.parameters(), copied.parameters(), strict=True):
        assert weight is same
    reader.loaded.model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "eager"


def test_shares_are_those_of_the_probe() -> None:
    reader = MapReader(loaded(tiny_model("v1")))
    passage = Passage(reader.encode(TEXT), (1, 6), (2, 4), 0)
    signed, absolute = last_rows(reader.loaded.model, torch.tensor([passage.ids]))
    shares = reader.shares(passage)
    assert shares["absolute"][0] == pytest.approx((absolute[:, 2:4].sum(-1) / absolute.sum(-1)).tolist())
    assert shares["signed"][2] == pytest.approx(((signed[:, 0] + signed[:, 6:].sum(-1)) / absolute.sum(-1)).tolist())
    assert [sum(layer) for layer in zip(*shares["absolute"], strict=True)] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The text is empty"),
        (" \n", "The text is empty"),
        ("w7 " * (LIMIT + 1), f"The text has {LIMIT + 1:,} tokens for tiny. The limit is {LIMIT}"),
    ],
)
def test_text_that_cannot_be_shown_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MapReader(loaded(tiny_model())).encode(text)


@pytest.mark.parametrize(("layer", "head"), [(2, 0), (0, 4), (0, -1), (-1, 0)])
def test_head_that_does_not_exist_is_refused(layer: int, head: int) -> None:
    reader = MapReader(loaded(tiny_model()))
    with pytest.raises(ValueError, match=f"tiny has no layer {layer} with a head {head}"):
        reader.head(reader.encode(TEXT), layer, head)
