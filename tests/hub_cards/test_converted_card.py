import re

import pytest
from huggingface_hub import ModelCard
from tiny import tiny_model, tiny_tokenizer

from diffllama.hub_cards import converted_card


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_the_card_tells_facts_of_the_model_and_its_code_is_python(chat: bool) -> None:
    model, tokenizer = tiny_model("v2"), tiny_tokenizer() if chat else None
    text = str(converted_card(model, tokenizer, "llama"))
    card = ModelCard(text)
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert "diff-v2" in card.data.tags
    for row in (
        f"| parameters | {model.num_parameters():,} |",
        "| layers, hidden width | 2, 64 |",
        "| differential heads h (softmax maps 2h) | 4 (8) |",
        "| key/value heads | 2 |",
        "| width D of keys and values | 16 |",
    ):
        assert row in card.text
    (snippet,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    compile(snippet, "card", "exec")
    assert ("messages" in snippet) == chat
