import threading
import time

import pytest
import torch

from diffllama.evaluation.models import LoadedModel
from diffllama.explorer import chat
from support.tiny_models import tiny_model, tiny_tokenizer


ASKED = [{"role": "user", "content": "w7 w8 w9"}]


@pytest.fixture
def loaded() -> LoadedModel:
    return LoadedModel(name="tiny", model=tiny_model("v2"), tokenizer=tiny_tokenizer())


def test_answer_is_streamed_and_equals_generate(loaded: LoadedModel) -> None:
    answers = list(chat.answer(loaded, ASKED, 0, 20))
    ids, _ = chat.prompt(loaded, ASKED)
    generated = loaded.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
    assert answers[-1].text.split() == loaded.tokenizer.decode(generated, skip_special_tokens=True).split()
    assert len(answers) > 5
    assert answers[-1].tokens == 20
    assert answers[-1].speed > 0
    assert str(chat.Answer("w7", 1, None)) == "1 token"
    assert str(answers[-1]) == f"20 tokens, {answers[-1].speed:.1f} tokens/s"


def test_temperature_samples(loaded: LoadedModel) -> None:
    texts = {list(chat.answer(loaded, ASKED, 1.5, 12))[-1].text for _ in range(4)}
    assert len(texts) > 1


def test_prompt_has_the_chat_template(loaded: LoadedModel) -> None:
    conversation = [*ASKED, {"role": "assistant", "content": "w10"}, {"role": "user", "content": "w11"}]
    text = loaded.tokenizer.decode(chat.prompt(loaded, conversation)[0])
    assert " ".join(text.split()) == "<s> <|user|> w7 w8 w9 <|assistant|> w10 <|user|> w11 <|assistant|>"
    loaded.tokenizer.chat_template = None
    assert loaded.tokenizer.decode(chat.prompt(loaded, conversation)[0]).split()[-1] == "w11"


def test_closed_answer_stops_the_generation(loaded: LoadedModel) -> None:
    before = threading.active_count()
    answers = chat.answer(loaded, ASKED, 0, 240)
    next(answers)
    started = time.perf_counter()
    answers.close()
    assert threading.active_count() == before
    assert time.perf_counter() - started < 1


def test_answer_ends_where_the_context_ends(loaded: LoadedModel) -> None:
    ids, remaining = chat.prompt(loaded, ASKED)
    assert remaining == 256 - len(ids)
    long = [{"role": "user", "content": "w7 " * 250}]
    assert list(chat.answer(loaded, long, 0, 100))[-1].tokens == chat.prompt(loaded, long)[1]


def test_conversation_that_fills_the_context_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"conversation has \d+ tokens, and the context of tiny 256\. Begin a new"):
        next(chat.answer(loaded, [{"role": "user", "content": "w7 " * 260}], 0, 5))


def test_failed_generation_does_not_show_internals(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(loaded.model, "generate", fail)
    with pytest.raises(ValueError, match=r"^tiny could not answer: RuntimeError\.$"):
        list(chat.answer(loaded, ASKED, 0, 5))
