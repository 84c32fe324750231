"""Needles are at their stated places, and prompts have the allowed length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffllama.evaluation.datasets.haystack import Haystack, ask
from support.rule_based_lm import byte_tokenizer, rule_based_lm


TOKENIZER = byte_tokenizer()
TEXT = "".join(f"Sentence {number} is {'very ' * (number % 3)}short. " for number in range(200))


def haystack(text: str = TEXT, length: int = 2000) -> Haystack:
    return Haystack([text], rule_based_lm(lambda _: "", ""), length)


HAYSTACK = haystack()


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(700, 2000),
    depth=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    needles=st.integers(1, 6),
    data=st.data(),
    seed=st.text(max_size=3),
)
def test_prompt_has_length_needles_and_depth_asked_for(
    length: int, depth: float, needles: int, data: st.DataObject, seed: str
) -> None:
    queries = data.draw(st.integers(1, needles))
    prompt = HAYSTACK.prompt(length=length, depth=depth, needles=needles, queries=queries, seed=seed)
    size = len(TOKENIZER.encode(prompt.text))
    assert length - 35 < size <= length  # the longest sentence has 33 bytes
    assert len(prompt.numbers) == len(prompt.needles) == queries
    start, end = prompt.context
    question = prompt.text[end:]
    for number, (first, last) in zip(prompt.numbers, prompt.needles, strict=True):
        needle = prompt.text[first:last]
        assert start <= first < last <= end
        assert needle.startswith("The magic number of ")
        assert needle.endswith(f" is {number}.")
        assert needle.split()[4] in question
        assert prompt.text.count(number) == 1
    assert prompt.text.count("The magic number of ") - prompt.text.count("Answer: The magic number of ") == needles
    (first, last), rest = prompt.needles[0], end - start
    if depth in (0.0, 1.0):
        assert (first, last)[int(depth)] == (start, end)[int(depth)]
    elif needles == 1:
        assert (first - start) / (rest - (last - first)) == pytest.approx(depth, abs=35 / (rest - (last - first)))


def test_same_text_numbers_and_cities_at_every_depth() -> None:
    prompts = [HAYSTACK.prompt(length=900, depth=depth, needles=1, queries=1, seed="a") for depth in (0, 0.5, 1)]
    assert len({tuple(prompt.numbers) for prompt in prompts}) == 1
    assert len({prompt.text for prompt in prompts}) == 3
    without = {prompt.text.replace(prompt.text[slice(*prompt.needles[0])] + " ", "", 1) for prompt in prompts[:2]}
    assert len(without) == 1


def test_another_seed_is_another_prompt() -> None:
    one, other = (HAYSTACK.prompt(length=900, depth=0, needles=1, queries=1, seed=seed) for seed in "ab")
    assert one.numbers != other.numbers


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        (" 1234567.", 0.5),
        (" 7654321 and 1234567", 1.0),
        (" 1234567 and 7654321.\n\nQuestion:", 1.0),
        (" 12345678 and 17654321", 0.0),
        ("", 0.0),
    ],
)
def test_fraction_found_of_completions(completion: str, share: float) -> None:
    prompt = HAYSTACK.prompt(length=900, depth=0, needles=2, queries=2, seed="a")
    object.__setattr__(prompt, "numbers", ["1234567", "7654321"])
    assert prompt.fraction_found(completion) == share


def test_questions_are_english() -> None:
    assert ask(["Rome"]) == "\n\nQuestion: What is the magic number of Rome?\nAnswer: The magic number of Rome is"
    assert ask(["Rome", "Oslo"]).endswith("Answer: The magic numbers of Rome and Oslo are")
    assert "of Rome, Oslo and Lima?" in ask(["Rome", "Oslo", "Lima"])


def test_too_short_and_empty_are_refused() -> None:
    with pytest.raises(ValueError, match="--length must hold the question and a sentence of text, got 100 tokens"):
        HAYSTACK.prompt(length=100, depth=0, needles=1, queries=1, seed="a")
    with pytest.raises(ValueError, match=r"No text has a sentence in its first 200,000 characters.*--data.*--length"):
        haystack("no end of it")


def test_text_that_is_too_short_is_repeated() -> None:
    prompt = haystack("One. Two. Three.").prompt(length=600, depth=0.5, needles=1, queries=1, seed="a")
    assert prompt.text.count("One. Two. Three.") > 5


def test_depth_is_of_the_text_and_not_of_its_sentences() -> None:
    uneven = haystack("".join(["Short. "] * 60 + [f"{'Long ' * 11}end. "] * 7))
    for seed in "abc":
        prompt = uneven.prompt(length=1000, depth=0.5, needles=1, queries=1, seed=seed)
        (first, last), (start, end) = prompt.needles[0], prompt.context
        assert (first - start) / (end - start - (last - first)) == pytest.approx(0.5, abs=0.05)


def test_sentence_longer_than_budget_is_skipped() -> None:
    text = haystack("".join([f"{'long ' * 200}end. ", "Short. "]))
    for seed in "abcdef":
        prompt = text.prompt(length=400, depth=0, needles=1, queries=1, seed=seed)
        assert "Short." in prompt.text
