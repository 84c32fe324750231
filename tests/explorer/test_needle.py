import pytest

from diffllama.evaluation.models import LoadedModel
from diffllama.explorer.needle import EXAMPLE_LENGTH, Question, example
from support.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture
def loaded() -> LoadedModel:
    return LoadedModel(name="tiny", model=tiny_model(), tokenizer=tiny_tokenizer())


def test_parts_are_the_marked_ones(loaded: LoadedModel) -> None:
    passage = Question("w7 w8 ", "w9 [[w10 w11]] w12", " w13 w14").passage(loaded)
    ids = loaded.tokenizer.convert_tokens_to_ids
    assert passage.ids == loaded.prefix + ids([f"w{number}" for number in range(7, 15)])
    assert [passage.ids[slice(*span)] for span in (passage.answer, passage.context)] == [
        ids(["w10", "w11"]),
        ids(["w9", "w10", "w11", "w12"]),
    ]


def test_answer_may_end_with_a_bracket(loaded: LoadedModel) -> None:
    passage = Question("", "w7 [[[ w8 ]]] w9", " w10").passage(loaded)
    assert loaded.tokenizer.decode(passage.ids[slice(*passage.answer)]) == "<unk> w8 <unk>"


def test_example_is_a_prompt_of_the_probe(loaded: LoadedModel) -> None:
    question = example(loaded)
    passage = question.passage(loaded)
    assert question.before.startswith("There are magic numbers")
    assert "[[The magic number of" in question.text
    assert question.question.endswith(" is")
    assert EXAMPLE_LENGTH / 2 < len(passage.ids) <= EXAMPLE_LENGTH


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Question("", "w7 w8", "w9"), r"must mark one answer as \[\[answer\]\], found 0"),
        (Question("", "[[w7]] [[w8]]", "w9"), "found 2"),
        (Question("", "[[w7]]", " "), "The question is empty"),
    ],
)
def test_unclear_question_is_refused(loaded: LoadedModel, question: Question, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        question.passage(loaded)
