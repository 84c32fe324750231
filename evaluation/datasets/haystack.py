# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Key information retrieval: sentences with cities' magic numbers, hidden in a long text (paper, section 3.4).

The paper follows the protocol of Large World Model and Gemini 1.5. It does not print its prompts; these are our own.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diffllama.evaluation.models import LoadedModel


# fmt: off
CITIES = (
    "Accra", "Algiers", "Amman", "Ankara", "Athens", "Baghdad", "Bangkok", "Beirut", "Belgrade", "Berlin", "Bern",
    "Bogota", "Boston", "Brussels", "Bucharest", "Budapest", "Cairo", "Canberra", "Caracas", "Chicago", "Colombo",
    "Copenhagen", "Dakar", "Damascus", "Delhi", "Denver", "Dhaka", "Dublin", "Geneva", "Hanoi", "Havana", "Helsinki",
    "Istanbul", "Jakarta", "Kabul", "Kampala", "Kyiv", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Miami",
    "Milan", "Montreal", "Moscow", "Munich", "Nairobi", "Oslo", "Ottawa", "Paris", "Prague", "Quito", "Rabat", "Riga",
    "Rome", "Santiago", "Seattle", "Seoul", "Singapore", "Sofia", "Stockholm", "Sydney", "Taipei", "Tallinn", "Tehran",
    "Tirana", "Tokyo", "Toronto", "Tripoli", "Tunis", "Vienna", "Vilnius", "Warsaw", "Zagreb", "Zurich",
)
# fmt: on

HEAD = "There are magic numbers of cities hidden in the following text. Remember them.\n\n"


@dataclass(frozen=True)
class Prompt:
    """A text with needles, and a question about some of them.

    Args:
        text: head, haystack with needles, question, and the beginning of the answer.
        numbers: the requested numbers, in the order of the question.
        needles: for each of them, the span of its needle, [start, end) in characters of `text`.
        context: the span of the haystack with all needles, [start, end) in characters of `text`.
    """

    text: str
    numbers: list[str]
    needles: list[tuple[int, int]]
    context: tuple[int, int]

    def fraction_found(self, completion: str) -> float:
        """Return the fraction of the requested numbers found in a completion, written without commas."""
        numbers = re.findall(r"\d+", completion)
        return sum(number in numbers for number in self.numbers) / len(self.numbers)


class Haystack:
    """Sentences of long texts, enough to fill four prompts, and the number of tokens of each.

    Args:
        texts: the long texts.
        loaded: has the tokenizer.
        length: length of a prompt in tokens.

    Raises:
        ValueError: the texts have no sentence.
    """

    def __init__(self, texts: Iterable[str], loaded: LoadedModel, length: int) -> None:
        self.loaded = loaded
        self.sentences: list[str] = []
        self.sizes: list[int] = []
        for text in texts:
            flat = " ".join(text[: 100 * length].split())
            sentences = [match.strip() for match in re.findall(r"[^.!?]+[.!?]+[\"”’')]*", flat)]
            self.sentences += sentences
            self.sizes += [len(loaded.encode(f" {sentence}")) for sentence in sentences]
            if sum(self.sizes) > 4 * length:
                break
        if not self.sentences:
            raise ValueError(
                f"No text has a sentence in its first {100 * length:,} characters. Name other texts with --data, or "
                "raise --length."
            )

    def prompt(self, *, length: int, depth: float, needles: int, queries: int, seed: str) -> Prompt:
        """Make a prompt with needles.

        Args:
            length: in tokens. The prompt may be shorter by less than a sentence.
            depth: of the first requested needle, from 0, the beginning of the text, to 1, its end.
            needles: how many are hidden. All but the first are at random depths.
            queries: how many are asked for.
            seed: determines cities, numbers, depths and the part of the text.

        Raises:
            ValueError: `length` tokens do not hold the question and a sentence.
        """
        draw = random.Random(seed)
        cities = draw.sample(CITIES, needles)
        numbers = [str(draw.randrange(1_000_000, 10_000_000)) for _ in cities]
        facts = [f"The magic number of {city} is {number}." for city, number in zip(cities, numbers, strict=True)]
        question = ask(cities[:queries])
        rest = self.loaded.prefix + self.loaded.encode(HEAD + " ".join(facts) + question)
        budget = length - len(rest) - 1  # joining two texts may take another token
        start = draw.randrange(len(self.sentences))
        while self.sizes[start] > budget >= min(self.sizes):
            start = (start + 1) % len(self.sizes)
        before = [0]  # tokens before each place for a needle
        while (after := before[-1] + self.sizes[(start + len(before) - 1) % len(self.sizes)]) <= budget:
            before.append(after)
        taken = len(before) - 1
        if not taken:
            raise ValueError(f"--length must hold the question and a sentence of text, got {length} tokens.")
        place = min(range(taken + 1), key=lambda at: abs(before[at] - depth * before[-1]))
        places = [place, *(draw.randrange(taken + 1) for _ in facts[1:])]
        text, spans = HEAD, {}
        for place in range(taken + 1):
            here = [index for index, at in enumerate(places) if at == place]
            for index in sorted(here, key=lambda index: (index == 0) == (depth > 0.5)):  # the first is the outermost
                text += facts[index]
                spans[index] = (len(text) - len(facts[index]), len(text))
                text += " "
            if place < taken:
                text += self.sentences[(start + place) % len(self.sentences)] + " "
        text = text.rstrip()
        context = (len(HEAD), len(text))
        return Prompt(text + question, numbers[:queries], [spans[index] for index in range(queries)], context)


def ask(cities: Sequence[str]) -> str:
    """Return the question for the cities' magic numbers, with the beginning of its answer."""
    if len(cities) == 1:
        topic = f"the magic number of {cities[0]}"
        return f"\n\nQuestion: What is {topic}?\nAnswer: T{topic[1:]} is"
    topic = f"the magic numbers of {', '.join(cities[:-1])} and {cities[-1]}"
    return f"\n\nQuestion: What are {topic}?\nAnswer: T{topic[1:]} are"
