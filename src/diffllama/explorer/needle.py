# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""A text with a marked answer and a question, as `diffllama probe attention` has them."""

import re
from dataclasses import dataclass

from diffllama.evaluation.datasets.data import find, texts
from diffllama.evaluation.datasets.haystack import Haystack
from diffllama.evaluation.models import LoadedModel
from diffllama.evaluation.probes.attention import Passage, passage_of


MARKED = re.compile(r"\[\[(.+?)\]\](?!\])", re.DOTALL)
"""The answer in a text."""

EXAMPLE_LENGTH = 300
"""Tokens of the built-in example."""


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Args:
        before: what precedes the text, such as an instruction.
        text: the text, in which `[[…]]` marks the answer.
        question: what follows it, up to the beginning of the answer.
    """

    before: str
    text: str
    question: str

    def passage(self, loaded: LoadedModel) -> Passage:
        """Encode the prompt for a model.

        Raises:
            ValueError: no answer is marked, or several, or the question is empty.
        """
        answers = MARKED.findall(self.text)
        if len(answers) != 1:
            raise ValueError(f"The text must mark one answer as [[answer]], found {len(answers)}.")
        if not self.question.strip():
            raise ValueError("The question is empty. Write one.")
        text = MARKED.sub(lambda match: match[1], self.text)
        start = len(self.before)
        answer = start + self.text.index("[[")
        context = (start, start + len(text))
        return passage_of(
            loaded, self.before + text + self.question, context, (answer, answer + len(answers[0])), depth=0
        )


def example(loaded: LoadedModel) -> Question:
    """Return a prompt of `diffllama probe attention`, on its built-in texts."""
    haystack = Haystack(texts(find("novels", None)).values(), loaded, EXAMPLE_LENGTH)
    prompt = haystack.prompt(length=EXAMPLE_LENGTH, depth=0.5, needles=1, queries=1, seed="0 0")
    (first, last), ((start, end),) = prompt.context, prompt.needles
    text = prompt.text
    return Question(text[:first], f"{text[first:start]}[[{text[start:end]}]]{text[end:last]}", text[last:])
