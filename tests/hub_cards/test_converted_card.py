import re
from typing import Any

import pytest
from huggingface_hub import ModelCard
from tiny import VARIANTS, tiny_config

from diffllama.hub_cards import converted_card


def record(result: str = "diff_llama", **source: Any) -> dict[str, Any]:
    return {
        "tool": "diffllama 9.9",
        "source": {"format": "llama", "model_type": "llama", "name": "some-llama", "index_sha256": "abc", **source},
        "result": {"format": result, "variant": "v2"},
        "options": {"variant": None, "pairing": None, "dtype": "auto"},
        "verification": {
            "compared": "logits", "dtype": "float32", "sequences": 3, "length": 32, "max_difference": 0.00123,
            "mean_difference": 0.0, "largest_output": 7.5, "bit_equal": False, "same_top_token": 0.5, "tolerance": 0.1,
        },
    }  # fmt: skip


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_the_card_tells_facts_of_the_model_and_its_code_is_python(chat: bool) -> None:
    text = str(converted_card(tiny_config("v2"), record(), 12345, chat=chat))
    card = ModelCard(text)
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert "diff-v2" in card.data.tags
    assert card.data.base_model is None
    for row in (
        "| source | some-llama |",
        "| SHA-256 of the source's index | `abc` |",
        "| tool | diffllama 9.9 |",
        "| dtype | auto |",
        "| verified | logits of 3 sequences of 32 tokens in float32, with and without cache |",
        "| bit-equal | no |",
        "| max, mean difference | 0.00123, 0 (largest of logits: 7.5) |",
        "| same top token | 50.0 % |",
        "| parameters | 12,345 |",
        "| layers, hidden width | 2, 64 |",
        "| differential heads h (softmax maps 2h) | 4 (8) |",
        "| key/value heads | 2 |",
        "| width D of keys and values | 16 |",
    ):
        assert f"\n{row}\n" in card.text
    (snippet,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    compile(snippet, "card", "exec")
    assert ("messages" in snippet) == chat
    assert "trust_remote_code=True" in snippet


def test_a_repository_is_the_base_model_with_its_revision() -> None:
    card = converted_card(tiny_config("v2"), record(name="org/llama", revision="0123"), 1)
    assert card.data.base_model == "org/llama"
    assert "| source | org/llama, revision 0123 |" in card.text


def test_a_model_that_was_not_verified_says_why() -> None:
    unverified = record() | {"verification": {"skipped": "not asked for"}}
    text = converted_card(tiny_config("v2"), unverified, 1).text
    assert "| verification | none: not asked for |" in text
    assert "bit-equal" not in text


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("result", ["transformers", "unilm-v1", "unilm-v2"])
def test_what_is_no_model_of_ours_is_not_said_to_load_with_our_code(result: str, variant: str) -> None:
    card = converted_card(tiny_config(variant), record(result, format="diff_llama"), 1)
    assert f"converted to {result}" in card.text
    assert "trust_remote_code" not in card.text
    assert ("pipeline(" in card.text) is (result == "transformers")
    assert (card.data.library_name is None) is (result != "transformers")


def test_attention_alone_is_said_to_be_no_model() -> None:
    card = converted_card(tiny_config("v1"), record(format="unilm-v1"), 1, part=True)
    assert "attention.safetensors" in card.text
    assert "pipeline(" not in card.text
    assert "| vocabulary |" not in card.text


@pytest.mark.parametrize("options", [{"chat": True}, {}, {"part": True}], ids=str)
@pytest.mark.parametrize("result", ["diff_llama", "transformers", "unilm-v1"])
def test_no_card_has_holes(result: str, options: dict[str, bool]) -> None:
    text = str(converted_card(tiny_config("v1"), record(result), 1, **options))
    assert not re.search(r"\{\{|\{%|Undefined|None|\n\n\n|[^\n]\n## | \n", text), text
