# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Mathematical word problems: their files, worked examples, and the check of a completion's answer."""

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from diffllama.evaluation.datasets.data import Source, field, read_rows, read_text, text_field
from diffllama.evaluation.settings import WordProblemTask


FOLDERS = {"math": "multiple_choice"}
"""Tasks whose data have another name in `find`."""

FILES = {
    "gsm8k": "test.jsonl",
    "math": "math.jsonl",
    "svamp": "SVAMP.json",
    "asdiv": "ASDiv.xml",
    "mawps": "fold0.dev.csv",
}
"""Task -> its file. For MAWPS, all `.csv` files are read."""

INSTRUCTION = "\n\nReason step by step, and put your final answer within \\boxed{}."
"""The instruction after a problem in a chat."""

WORDS = (
    (
        "A bakery packs 6 rolls into a bag. It has packed 7 bags, and 5 rolls are left over. How many rolls are there?",
        "The bags hold 6 * 7 = 42 rolls. With those left over there are 42 + 5 = 47 rolls. The answer is 47.",
    ),
    (
        "Nora had $40. She bought 3 tickets for $8 each. How many dollars has she left?",
        "The tickets cost 3 * 8 = 24 dollars. Nora has 40 - 24 = 16 dollars left. The answer is 16.",
    ),
    (
        "A tank holds 90 litres and is one third full. 12 litres are drawn from it. How many litres are in it now?",
        "One third of 90 litres is 90 / 3 = 30 litres. Then 30 - 12 = 18 litres are in it. The answer is 18.",
    ),
    (
        "Omar walks 4 km in the morning and twice as far in the evening, 5 days a week. How many km is that in a week?",
        "In the evening he walks 2 * 4 = 8 km, so 4 + 8 = 12 km a day. In a week it is 12 * 5 = 60. The answer is 60.",
    ),
)
"""Worked examples. A completion should end as their solutions do."""

LATEX = (
    ("What is the value of $2^5 - 3 \\cdot 4$?", "We have $2^5 = 32$ and $3 \\cdot 4 = 12$. The answer is $20$."),
    (
        "A bag holds 4 red and 6 blue balls. What is the probability that a ball drawn at random is red?",
        "There are $4 + 6 = 10$ balls, of which 4 are red, and $\\frac{4}{10} = \\frac{2}{5}$. "
        "The answer is $\\frac{2}{5}$.",
    ),
    (
        "Solve $3x + 7 = 22$ for $x$.",
        "Subtracting 7 gives $3x = 15$, and dividing by 3 gives $x = 5$. The answer is $5$.",
    ),
    (
        "A right triangle has legs of length 2 and 6. What is the length of its hypotenuse?",
        "It is $\\sqrt{2^2 + 6^2} = \\sqrt{40} = 2\\sqrt{10}$. The answer is $2\\sqrt{10}$.",
    ),
)
"""Worked examples for MATH, whose answers are LaTeX."""


# --- files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A question and its correct answer."""

    question: str
    answer: str


def read(task: WordProblemTask, source: Source) -> dict[str, Problem]:
    """Read the problems of a task by name, from its publisher's files.

    Args:
        task: determines the format.
        source: a file, or a folder with it: gsm8k `test.jsonl`; math `math.jsonl`; svamp `SVAMP.json`; asdiv
            `ASDiv.xml`; mawps any number of `.csv` files with the columns `Question`, `Numbers` and `Answer`. A row of
            gsm8k and math has the problem in `question`, `problem` or `context`, and `answer`; only the text after
            "####" counts, if there is any. Other data in this format can be read, too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format.
    """
    files = sorted(source.path.glob("[!.]*.csv")) if task == "mawps" else []
    by_name = {
        f"{file.name}:{number}": _problem(row, task, file)
        for file in files or [source.file(FILES[task])]
        for number, row in enumerate(_xml_rows(file) if task == "asdiv" else read_rows(file))
    }
    if not by_name:
        raise ValueError(f"{source.path} has no problem.")
    return by_name


def _xml_rows(file: Path) -> list[dict[str, str]]:
    try:
        root = ElementTree.fromstring(read_text(file))
    except ElementTree.ParseError as error:
        raise ValueError(f"{file} is not XML: {error}") from error
    return [{child.tag: child.text or "" for child in problem} for problem in root.iter("Problem")]


def _problem(row: dict[str, Any], task: WordProblemTask, file: Path) -> Problem:
    if task in ("gsm8k", "math"):
        return Problem(text_field(row, ("question", "problem", "context"), file), _answer(row, "answer", file))
    if task == "mawps":
        question = _unmasked(row, file)
    else:
        body, question = (text_field(row, name, file).strip() for name in ("Body", "Question"))
        whole = body.endswith((".", "?", "!"))  # other bodies begin their question: "If there are 3 more"
        question = f"{body}{'' if whole else ','} {question}"
    return Problem(question, _answer(row, "Answer", file))


def _unmasked(row: dict[str, Any], file: Path) -> str:
    """Return the question of a row of MAWPS with the numbers of its column `Numbers` filled in."""
    numbers = [number.removesuffix(".0") for number in field(row, "Numbers", file).split()]
    masked = text_field(row, "Question", file)
    words = re.split(r"number(\d+)", masked)
    try:
        words[1::2] = [numbers[int(at)] for at in words[1::2]]
    except IndexError as error:
        raise ValueError(f"{file} has a question with more numbers than its `Numbers`: {masked}") from error
    return "".join(words)


def _answer(row: dict[str, Any], name: str, file: Path) -> str:
    """Return an answer, a number or a text, without what precedes "####"."""
    given = field(row, name, file)
    text = str(given) if type(given) in (int, float) else text_field(row, name, file)
    return text_field({name: text.rpartition("####")[2].strip()}, name, file)


# --- answers --------------------------------------------------------------------------------------------------------

NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
UNIT = (
    r"(?:\s+\(?(?![^.,;]*\bhalf\b|(?:and|pi)\b)(?:[a-z]{2}|[ghlms](?!\w|\s*-))(?:[^\d\\^=+*/]|/[a-z])*?(?:\^[23])?)?"
    r"\s*(?:\.(?:\s.*)?|[,;!](?:\s+(?!(?:and|or)\b)[a-z]{2}.*)?)?"
)
"""What may follow a number: words or the letter of a metric unit, perhaps squared, and the end of the clause."""

SPELLINGS = (
    ("−", "-"),
    (r"\{,\}", ","),
    (r"\s?\\!\s*", ""),
    (r"(?<!\\)\\[,;: ()\[\]]|\\left\b|\\right\b|\\?[$%]|\^\{?\\circ\}?|°|\*\*", ""),
    (r"\\(?:text|textbf|textrm|mathrm|mbox)\{([^{}]*)\}", r"\1"),
    (r"(?<=\d),(?=\d{3}(?:,\d{3})*\})", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(\d)", r"\\frac{\1}"),
    (r"\\frac\{(-?\d+)\}\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\{(-?\d+)\}\s*\{(\d+)\}", r" \1/\2"),
)
"""Equivalent spellings and their normal form, applied in this order."""


@dataclass(frozen=True)
class Final:
    """A completion's answer, where it begins, and whether it is stated as one, and not merely the last number.

    If none is stated, `start` is the completion's length.
    """

    text: str
    start: int
    stated: bool


def final_answer(completion: str) -> Final:
    r"""Return the last `\boxed{}`, or else what follows the last "answer is" or "####", or the last number.

    What follows is the rest of the line or a displayed formula; or the next line, if it begins as a number or formula.
    """
    box = completion.rfind("\\boxed{")
    if box >= 0 and (inside := _braced(completion[box + len("\\boxed{") :])) is not None:
        return Final(inside, box, True)
    mark = r"(?:\banswer(?: is|:)|####)(?:[ :*]*(?=[^\s:*])|[\s:*]*(?=[-−+]?[.$\\(\d])(?!\d+[.)] +\S))"
    marks = list(re.finditer(mark, completion, re.IGNORECASE))
    if marks:
        start = marks[-1].end()
        line = re.findall(r"(?s:\\\[.*?\\\]|\$\$.*?\$\$)|.*", completion[start:])[0]
        return Final(line.strip(), start, True)
    numbers = re.findall(rf"(?<![\w.]){NUMBER}", completion)
    return Final(numbers[-1] if numbers else "", len(completion), False)


def _braced(text: str) -> str | None:
    """Return the text before the closing brace."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:at]
    return None


def value(answer: str) -> Fraction | str:
    """Return the value of an answer: a number, with or without a unit, or else the text without spaces.

    Thousands' commas, dollar and per cent signs, degrees and LaTeX's spaces and delimiters do not count; `\\frac12`,
    1/2 and 0.5 are one number. An expression with a root, π or a variable is a text: it equals only one that is
    written like it.
    """
    for pattern, replacement in SPELLINGS:
        answer = re.sub(pattern, replacement, answer)
    text = answer.strip().lower()
    text = re.sub(r"^(?:(?:[a-z]\s*|[^a-z\\]*)=\s*)?\+?\s*", "", text)  # x = 5, 2 + 3 = 5, +5
    if len(text) > 200:  # no number, and slow to read as one
        return text
    if match := re.fullmatch(rf"(-?)\s*(?:(\d+)\s+)?(-?\d+)/([1-9]\d*){UNIT}", text):
        sign, whole, numerator, denominator = match.groups()
        return (-1 if sign else 1) * (int(whole or 0) + Fraction(int(numerator), int(denominator)))
    if match := re.fullmatch(rf"({NUMBER}){UNIT}", text):
        return Fraction(match[1].replace(",", ""))
    return re.sub(r"\s+", "", text).rstrip(".")


def correct(answer: str, right: str) -> bool:
    """Whether an answer means the right one: the same text or number.

    Numbers may differ by a ten thousandth of the right one, but by no more than 0.0001, as 5/6 and 0.8333 do.
    """
    meaning, right_meaning = value(answer), value(right)
    if isinstance(meaning, str) or isinstance(right_meaning, str):
        return meaning == right_meaning
    return abs(meaning - right_meaning) <= min(Fraction(1), abs(right_meaning)) / 10_000
