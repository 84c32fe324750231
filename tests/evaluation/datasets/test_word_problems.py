"""Files of word problems, and answers in completions."""

from fractions import Fraction
from pathlib import Path

import pytest

from diffllama.evaluation.datasets.data import Source, find
from diffllama.evaluation.datasets.word_problems import (
    FOLDERS,
    LATEX,
    WORDS,
    Final,
    Problem,
    correct,
    final_answer,
    read,
    value,
)


@pytest.mark.parametrize(
    ("task", "count", "name", "problem"),
    [
        ("gsm8k", 6, "test.jsonl:4", ("A printer prints 25 pages a minute.", "1,250")),
        ("math", 6, "math.jsonl:3", ("What is the area of a circle with diameter $6$?", "9\\pi")),
        ("svamp", 5, "SVAMP.json:0", ("There are 24 pens in a box. If 9 of them are taken out, How many", "15.0")),
        ("asdiv", 5, "ASDiv.xml:0", ("Five grey doves and three white doves sit on a roof. How", "8 (doves)")),
        ("mawps", 5, "fold0.dev.csv:2", ("A shelf holds 15 cups and each cup costs 2.5 dollars .", "37.5")),
    ],
)
def test_files_of_each_task(task: str, count: int, name: str, problem: tuple[str, str]) -> None:
    problems = read(task, find(FOLDERS.get(task, task), None))
    assert len(problems) == count
    assert problems[name].question.startswith(problem[0])
    assert problems[name].answer == problem[1]


def test_all_files_of_a_folder_are_read(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"fold{number}.dev.csv").write_text(
            'Question,Numbers,Answer\n"number1 , number10 ?",0.0 1.5 2 3 4 5 6 7 8 9 10.0,12.0\n'
        )
    (tmp_path / "._fold0.dev.csv").write_text("hidden")
    problem = Problem("1.5 , 10 ?", "12.0")
    assert read("mawps", Source(tmp_path, False)) == {"fold0.dev.csv:0": problem, "fold1.dev.csv:0": problem}


def test_other_rows_of_that_form(tmp_path: Path) -> None:
    (tmp_path / "any.jsonl").write_text('{"problem": "2 + 2?", "answer": 4}\n')
    assert read("math", Source(tmp_path / "any.jsonl", False)) == {"any.jsonl:0": Problem("2 + 2?", "4")}


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("gsm8k", "test.jsonl", '{"text": "2 + 2?"}', "without `question` or `problem` or `context`; .* text"),
        ("math", "math.jsonl", '{"context": "2 + 2?"}', "math.jsonl has a row without `answer`"),
        ("gsm8k", "test.jsonl", '{"question": "?", "answer": true}', "answer must be .* got True"),
        ("gsm8k", "test.jsonl", '{"question": "?", "answer": "It is #### "}', "answer must be .* got ''"),
        ("svamp", "SVAMP.json", '[{"Body": "", "Question": "?", "Answer": 1}]', "Body must be .* got ''"),
        ("svamp", "SVAMP.json", '[{"Body": "1.", "Question": "?", "Answer": [1]}]', r"Answer must be .* got \[1\]"),
        ("svamp", "other.json", "[]", "has no SVAMP.json. Name the file or its folder with --data"),
        ("asdiv", "ASDiv.xml", "<a>", "ASDiv.xml is not XML"),
        ("asdiv", "ASDiv.xml", "<a><Problem><Body>1</Body></Problem></a>", "row without `Question`; .* Body"),
        ("asdiv", "ASDiv.xml", "<a/>", "has no problem"),
        ("mawps", "a.csv", "Question,Answer\n1,1", "a.csv has a row without `Numbers`"),
        ("mawps", "a.csv", "Question,Numbers,Answer\nnumber0,,1", "more numbers than its `Numbers`: number0"),
        ("mawps", "a.csv", "Question,Numbers,Answer\nnumber1,2,1", "more numbers than its `Numbers`: number1"),
        ("mawps", "a.csv", "Question,Numbers,Answer\nnumber0,2,", "a.csv has a row in which Answer must be .* got ''"),
    ],
)
def test_malformed_files_are_refused(task: str, name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(task, Source(tmp_path, False))


@pytest.mark.parametrize(
    ("completion", "final"),
    [
        ("2 + 2 = 4. The answer is 4.", Final("4.", 25, True)),
        ("The answer is 3? No: the answer is: $4$", Final("$4$", 36, True)),
        ("So 2 + 2 = 4\n#### 4\n", Final("4", 18, True)),
        ("**Final answer:** 1,000 m", Final("1,000 m", 18, True)),
        ("Is it $\\boxed{3}$? It is $\\boxed{\\frac{1}{2}}$, the answer is half.", Final("\\frac{1}{2}", 26, True)),
        ("The answer is 3, so \\boxed{3", Final("3, so \\boxed{3", 14, True)),  # cut off
        ("The answer is:\n18\nGood luck!", Final("18", 15, True)),
        ("**Answer:**\n\n18", Final("18", 13, True)),
        ("The answer is:\n\n\\[ 18 \\]\n", Final("\\[ 18 \\]", 16, True)),
        ("The answer is:\n\\[\n18\n\\]\n", Final("\\[\n18\n\\]", 15, True)),
        ("The answer is: $$\n18\n$$\n", Final("$$\n18\n$$", 15, True)),
        ("**Answer:**\nThere are 2 * 9 = 18 eggs.", Final("18", 38, False)),
        ("Answer:\n- She has 2 * 9 = 18.", Final("18", 29, False)),
        ("Answer:\n1. She has 2 * 9 = 18.", Final("18", 30, False)),
        ("It is 18. **Answer:** ", Final("18", 22, False)),  # cut off
        ("from 10-5 come 5.", Final("5", 17, False)),
        ("-7 and x2", Final("-7", 9, False)),
        ("no number", Final("", 9, False)),
    ],
)
def test_answer_of_a_completion(completion: str, final: Final) -> None:
    assert final_answer(completion) == final


# fmt: off
SPELLINGS: dict[Fraction | int, list[str]] = {
    18: [
        "18", " 18.0. ", "**18**", "18!", "+18", "x = +18", "\\(18\\).", "\\[\n18\n\\]", "18 dollars per day.",
        "18. She has 3 more.", "18, so she has 3 more.", "18 eggs, so she has 3 more.", "18; so she has 3 more",
    ],
    Fraction("1234.5"): ["$1,234.50"],
    Fraction(-1, 2): ["-\\$0.50"],
    -3: ["−3"],
    25: ["25\\%"],
    5040: ["5,\\!040"],
    90_900_909: ["90{,}900{,}909"],
    11_111_111_100: ["11,\\! 111,\\! 111,\\! 100"],
    111_111_111: ["111, \\! 111, \\! 111"],
    Fraction(12, 5525): ["\\frac{12}{5,\\!525}"],
    Fraction(1_234_567, 2): ["\\frac{1,234,567}{2}"],
    60: ["60 km/h"],
    Fraction("9.8"): ["9.8 m/s^2"],
    5: ["5 m", "5 m long", "x = 5", "2 + 3 = 5."],
    2: ["2 pizzas"],
    90: ["90°", "90^{\\circ}", "90^\\circ"],
    8: ["8 (doves)"],
    135: ["135\\text{ square feet}"],
    440: ["440\\text{ cm}^2"],
    Fraction(1, 2): [".5", "1/2", "\\frac12"],
    Fraction(3, 2): ["1 1/2 cups"],
    Fraction(-7, 17): ["-\\frac{7}{17}"],
    Fraction(5, 6): ["\\dfrac{5}{6}"],
    Fraction(9, 20): ["\\frac 9{20}"],
    Fraction(5, 4): ["1\\frac{1}{4}"],
    Fraction(3, 16): ["$ \\frac{3}{16} $."],
}
"""Number -> answers that are this number."""

DIFFERENT = {
    "18": ["81", "18 and 3", "18, 20", "18, or 20", "18 eggs, and 3"],
    "12": ["12 and a half", "12 hours and a half", "1,2"],
    "5": ["5! + 3", "5 x", "5 m - n"],
    "2": ["2 pi", "2/x", "2\\sqrt{3}", "2\\pi", "2x"],
    "0": ["", "0.001", "1/0", "20x - 69 = 0"],
    "(1100)": ["(1,100)"],
    "\\{1100\\}": ["\\{1,100\\}"],
    "5/6": ["0.833"],
    "70000": ["70001"],
    "0.0010": ["0.0011"],
    "June 20": ["July 20"],
}
"""Right answer -> answers that do not mean the same."""
# fmt: on


@pytest.mark.parametrize(
    ("number", "answer"), [(number, answer) for number, answers in SPELLINGS.items() for answer in answers]
)
def test_answers_that_are_numbers(number: Fraction | int, answer: str) -> None:
    assert value(answer) == number


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Mrs. Lane.", "Mrs. Lane"),
        ("\\text{(B)}", "(b)"),
        ("\\left( -\\frac{1}{4}, -2 \\right)", "(-\\tfrac{1}{4},-2)"),
        ("\\begin{pmatrix} 3 \\\\ -7 \\end{pmatrix}", "\\begin{pmatrix}3\\\\-7\\end{pmatrix}"),
        ("2 \\sqrt{3}", "2\\sqrt{3}."),
        ("y = 2x + 1", "2x+1"),
        ("-5, 1, 4", "-5,1,4"),
        ("0.8333", "5/6"),
        ("7" * 5000, "7" * 5000),
    ],
)
def test_answers_that_are_equal(one: str, other: str) -> None:
    assert correct(one, other)
    assert correct(other, one)


@pytest.mark.parametrize(
    ("answer", "right"), [(answer, right) for right, answers in DIFFERENT.items() for answer in answers]
)
def test_answers_that_are_not_equal(answer: str, right: str) -> None:
    assert not correct(answer, right)


@pytest.mark.parametrize("examples", [WORDS, LATEX])
def test_examples_state_their_answers(examples: tuple[tuple[str, str], ...]) -> None:
    finals = [final_answer(solution) for _, solution in examples]
    assert all(final.stated for final in finals)
    solved = [value(final.text) for final in finals]
    assert solved in ([47, 16, 18, 60], [20, Fraction(2, 5), 5, "2\\sqrt{10}"])
