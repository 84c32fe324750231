"""Log-likelihoods, compared with those of a single forward pass."""

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from diffllama.evaluation.likelihood import batches, completions, continuation_log_probs, token_log_probs
from diffllama.evaluation.models import LoadedModel
from support.rule_based_lm import RuleBasedLM, rule_based_lm
from support.tiny_models import VARIANTS, tiny_model, tiny_tokenizer, tokens


@pytest.fixture
def loaded() -> LoadedModel:
    tokenizer = rule_based_lm(lambda _: "", "").tokenizer
    return LoadedModel(name="tiny", model=tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer)


@pytest.mark.parametrize("chunk", [1, 7, 29, 30, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_token_log_probs_are_those_of_one_forward(variant: str, chunk: int) -> None:
    model, ids = tiny_model(variant), tokens(1, 30)
    whole = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(token_log_probs(model, ids, chunk), whole, rtol=1e-5, atol=1e-5)


def test_batches_are_of_equal_lengths_and_bounded() -> None:
    lengths = [3, 5, 3, 3, 9, 5]
    assert list(batches(dict(enumerate(lengths)), 6)) == [[4], [1], [5], [0, 2], [3]]


@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_continuations_are_scored_as_one_by_one(loaded: LoadedModel, batch_tokens: int) -> None:
    pairs = [("the sea ", "is"), ("the sea", " is"), ("a ", "boat"), ("a", " ship"), ("", "ab")]
    found = dict(continuation_log_probs(loaded, dict(enumerate(pairs)), batch_tokens))
    for index, (context, continuation) in enumerate(pairs):
        ids = loaded.tensor(loaded.encode(context + continuation))
        start = max(1, len(loaded.encode(context.rstrip())))
        whole = loaded.model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[start - 1 :, 0]
        assert found[index] == pytest.approx(whole.sum().item(), rel=1e-5)


def test_deterministic_model_gives_its_answer_probability_one() -> None:
    loaded = rule_based_lm(lambda question: " 7" if "city" in question else " 8", after="is")
    pairs = [("The city is ", "7"), ("The dog is", " 8"), ("The dog is ", "7")]
    assert dict(continuation_log_probs(loaded, dict(enumerate(pairs)))) == {0: 0.0, 1: 0.0, 2: float("-inf")}


def test_completions_are_what_generate_makes() -> None:
    loaded = rule_based_lm(lambda question: question[:3].upper(), after=": ")
    prompts = [loaded.encode(text) for text in ("abc: ", "defg: ", "hij: ")]
    assert dict(completions(loaded, dict(enumerate(prompts)), 8)) == {0: "ABC", 1: "DEF", 2: "HIJ"}
    assert dict(completions(loaded, dict(enumerate(prompts)), 2)) == {0: "AB", 1: "DE", 2: "HI"}


def test_completions_end_before_the_first_stop_string() -> None:
    loaded = rule_based_lm(lambda question: f" {question[0]} and so on. The end.", after=": ")
    prompts = [loaded.encode(text) for text in ("abc: ", "def: ")]
    for stop in (["The", " so", "sun"], [" so", "The"]):
        assert dict(completions(loaded, dict(enumerate(prompts)), 40, stop=stop)) == {0: " a and", 1: " d and"}
    assert dict(completions(loaded, dict(enumerate(prompts[:1])), 40, stop=["sun"])) == {0: " a and so on. The end."}


def test_stop_string_begun_in_the_prompt_does_not_count() -> None:
    loaded = rule_based_lm(lambda question: "\nb", after="a\n")
    assert dict(completions(loaded, {0: loaded.encode("a\n")}, 9, stop=["\n\n"])) == {0: "\nb"}


def test_whole_words_end_at_a_stop_string_row_by_row() -> None:
    # each word is followed by the next one: 10, 11, … and 15, 16, …; the second prompt reaches w17 first
    tokenizer, calls = tiny_tokenizer(), []

    def next_word(ids: list[int]) -> dict[int, float]:
        calls.append(ids)
        return {ids[-1] + 1: 0.0}

    loaded = LoadedModel(name="words", model=RuleBasedLM(next_word, 97).eval(), tokenizer=tokenizer)
    prompts = [[9, 10], [14, 15], [16, 17]]  # a stop string in the prompt does not count
    found = dict(completions(loaded, dict(enumerate(prompts)), 40, stop=["w17", "w20 w21"]))
    assert found == {0: "w11 w12 w13 w14 w15 w16 ", 1: "w16 ", 2: "w18 w19 "}
    assert max(map(len, calls)) == len(prompts[0]) + 6  # generation stops when the last completion has ended


def test_repetition_penalties_of_checkpoint_are_ignored() -> None:
    loaded = rule_based_lm(lambda question: "aaaa", after=": ")
    loaded.model.generation_config.repetition_penalty = 5.0
    loaded.model.generation_config.no_repeat_ngram_size = 2
    assert dict(completions(loaded, {0: loaded.encode("abc: ")}, 4)) == {0: "aaaa"}


def test_recurrent_model_is_refused() -> None:
    config = MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=1)
    with pytest.raises(ValueError, match="`mamba` has a recurrent state"):
        token_log_probs(MambaForCausalLM(config).eval(), tokens(1, 30))
