# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The task of track A: recall of key-value needles that are hidden in natural text.

A sequence is text, the noise, with needles `[ key value]` at random places, and then queries: needles again. Only the
values of queries count in the loss. Keys and values are frequent words, so the noise has them, too. The brackets are
tokens that the noise does not have. Queries of training sequences repeat: models of two layers then learn to match keys
within a few thousand steps, where without repetition they stay for long at guessing among the values.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from diffllama.evaluation.attention import watched
from diffllama.evaluation.figures import finish, panels
from diffllama.evaluation.models import model_spec
from diffllama.evaluation.probes.attention import Passage, last_rows
from diffllama.evaluation.probes.logit_bits import BITS, quantized_attention
from diffllama.evaluation.probes.outliers import KINDS, Magnitudes, magnitudes

from .report import draw_bars, draw_means, select
from .text import split_documents, train_tokenizer, write_sequences
from .values import Value


OPEN, CLOSE = "[", "]"

WITHOUT_BRACKETS = str.maketrans(OPEN + CLOSE, "()")

NEEDLE = 4
"""Tokens of a needle or a query: bracket, key, value, bracket."""

AS_TRAINED = "accuracy as trained"
"""Measure of sequences as the model was trained on, with text of held-out documents."""

BATCH_TOKENS = 32_768
"""Most tokens whose predictions are computed at once."""


def frequent_words(noise: Sequence[int], tokenizer: PreTrainedTokenizerFast, count: int) -> list[int]:
    """Return the `count` most frequent tokens that are a space and a word of at least three letters.

    Raises:
        ValueError: the text has fewer such tokens.
    """
    words = []
    for token, _ in Counter(noise).most_common():
        text = tokenizer.decode([token])
        if text[0] == " " and text[1:].isalpha() and len(text) > 3:
            words.append(token)
            if len(words) == count:
                return words
    raise ValueError(f"The text must have {count} frequent words that are one token each, found {len(words)}.")


@dataclass(frozen=True)
class Example:
    """A sequence as token ids, the places of its queries' values, and for each of them that of its needle's value.

    The noise and the needles are the tokens before `context`.
    """

    ids: list[int]
    answers: list[int]
    needles: list[int]
    context: int

    @property
    def row(self) -> dict[str, list[int]]:
        """The sequence as a tokenized row, in which only the values of queries are labels."""
        asked = set(self.answers)
        return {"input_ids": self.ids, "labels": [token if at in asked else -100 for at, token in enumerate(self.ids)]}

    @property
    def first(self) -> dict[int, int]:
        """The place of each needle's value that is asked for, and of the value in its first query."""
        places: dict[int, int] = {}
        for needle, answer in zip(self.needles, self.answers, strict=True):
            places.setdefault(needle, answer)
        return places


@dataclass(frozen=True)
class RecallTask:
    """Makes sequences of noise, needles and queries.

    Args:
        noise: token ids of the text.
        words: token ids from which keys and values are drawn.
        brackets: token ids of the brackets.
    """

    noise: Sequence[int]
    words: Sequence[int]
    brackets: tuple[int, int]

    def example(self, draw: random.Random, needles: int, asked: Sequence[int], noise: int) -> Example:
        """Make a sequence of `noise` + 4 · (`needles` + queries) tokens, with distinct keys.

        Args:
            draw: draws words, places and the part of the text.
            needles: how many.
            asked: the number of each query's needle.
            noise: number of tokens of text.

        Raises:
            ValueError: the text has fewer than `noise` tokens.
        """
        if noise > len(self.noise):
            raise ValueError(f"The text must have {noise} tokens, got {len(self.noise)}.")
        left, right = self.brackets
        keys = draw.sample(self.words, needles)
        pairs = [(key, draw.choice(self.words)) for key in keys]
        start = draw.randrange(len(self.noise) - noise + 1)
        text = self.noise[start : start + noise]
        places = sorted(draw.randrange(noise + 1) for _ in pairs)
        ids: list[int] = []
        value_at = []
        for before, place, (key, value) in zip([0, *places], places, pairs, strict=False):
            ids += [*text[before:place], left, key, value, right]
            value_at.append(len(ids) - 2)
        ids += text[places[-1] :]
        context = len(ids)
        for index in asked:
            ids += [left, *pairs[index], right]
        answers = [context + NEEDLE * number + 2 for number in range(len(asked))]
        return Example(ids, answers, [value_at[index] for index in asked], context)

    def training(self, draw: random.Random, needles: Sequence[int], noise: Sequence[int], length: int) -> Example:
        """Make a sequence of `length` tokens with one of the numbers of needles and of tokens of noise.

        Queries fill the rest; each asks for any needle.
        """
        count, tokens = draw.choice(needles), draw.choice(noise)
        queries, rest = divmod(length - tokens - NEEDLE * count, NEEDLE)
        return self.example(draw, count, [draw.randrange(count) for _ in range(queries)], tokens + rest)

    def test(self, draw: random.Random, needles: int, queries: int, length: int) -> Example:
        """Make a sequence of `length` tokens in which a needle is asked for at most once."""
        asked = draw.sample(range(needles), queries)
        return self.example(draw, needles, asked, length - NEEDLE * (needles + queries))


def prepare(settings: Mapping[str, Any], text: str, folder: Path) -> None:
    """Write the tokenizer, the sequences to train on (the last are held out), and the test sequences.

    The noise of held-out and test sequences is that of held-out documents.
    """
    task, pretrain = settings["recall"], settings["pretrain"]
    length, draw = pretrain["sequence_length"], random.Random(task["seed"])
    as_trained = task["needles"], task["noise"], length
    documents = [[document.translate(WITHOUT_BRACKETS) for document in part] for part in split_documents(text)]
    tokenizer = train_tokenizer(documents[0], pretrain["model"]["vocab_size"], [OPEN, CLOSE], length)
    tokenizer.save_pretrained(folder / "tokenizer")
    noise, held_out = (
        [token for ids in tokenizer(part, verbose=False).input_ids for token in ids] for part in documents
    )
    words = frequent_words(noise, tokenizer, task["words"])
    brackets = tuple(tokenizer.convert_tokens_to_ids([OPEN, CLOSE]))
    to_train, to_test = RecallTask(noise, words, brackets), RecallTask(held_out, words, brackets)

    sequences = pretrain["training"]["max_steps"] * pretrain["tokens_per_step"] // length
    write_sequences(
        folder,
        (to_train.training(draw, *as_trained).row for _ in range(sequences)),
        (to_test.training(draw, *as_trained).row for _ in range(settings["held_out"])),
    )
    tests = [(AS_TRAINED, 0, to_test.training(draw, *as_trained)) for _ in range(task["test_sequences"])]
    tests += [
        (measure, condition[0], to_test.test(draw, *condition))
        for measure, conditions in task["tests"].items()
        for condition in conditions
        for _ in range(task["test_sequences"])
    ]
    rows = [{"measure": measure, "needles": needles} | {"example": asdict(one)} for measure, needles, one in tests]
    Dataset.from_list(rows).to_parquet(folder / "tests.parquet")


@torch.inference_mode()
def correct(model: PreTrainedModel, examples: Sequence[Example]) -> list[list[bool]]:
    """Return whether the model predicts the values of each example's queries, without repeated ones.

    The examples have the same length.
    """
    found = []
    size = max(1, BATCH_TOKENS // len(examples[0].ids))
    for start in range(0, len(examples), size):
        batch = examples[start : start + size]
        ids = torch.tensor([example.ids for example in batch])
        right = (model(ids, use_cache=False).logits[:, :-1].argmax(-1) == ids[:, 1:]).tolist()
        found += [[row[at - 1] for at in example.first.values()] for row, example in zip(right, batch, strict=True)]
    return found


def accuracy(found: Sequence[Sequence[bool]]) -> float:
    """Return the fraction of all queries whose values were found."""
    return fmean(chain.from_iterable(found))


def shuffled(example: Example, draw: random.Random) -> Example:
    """Return the example with the needles that are asked in another order, in the same places."""
    ids, asked = list(example.ids), list(example.first)
    places = dict(zip(asked, draw.sample(asked, len(asked)), strict=True))
    for old, new in places.items():
        ids[new - 2 : new + 2] = example.ids[old - 2 : old + 2]
    return replace(example, ids=ids, needles=[places[needle] for needle in example.needles])


def attention(model: PreTrainedModel, examples: Sequence[Example]) -> Iterator[Value]:
    """Measure which share of the maps' rows the first query's key gives to its needle, the answer, and to the noise.

    The noise is the text and the other needles. As in `diffllama probe attention`, rows are averaged over layers and
    heads, and divided by their sum.
    """
    totals: dict[tuple[str, str], list[float]] = {}
    for example in examples:
        value = example.needles[0]
        passage = Passage(example.ids[: example.answers[0]], (0, example.context), (value - 2, value + 2), 0)
        for kind, rows in zip(("signed", "absolute"), last_rows(model, torch.tensor([passage.ids])), strict=True):
            whole = rows.sum(-1).mean()
            for part, share in passage.parts(rows).items():
                totals.setdefault((kind, part), []).append((share.mean() / whole).item())
    for (kind, part), shares in totals.items():
        yield Value("attention", {"shares": kind, "part": part}, fmean(shares))


def outliers(model: PreTrainedModel, examples: Sequence[Example]) -> Iterator[Value]:
    """Measure the largest and the median attention logits and hidden states, as `diffllama probe outliers`."""
    totals = {kind: Magnitudes() for kind in KINDS}
    for example in examples:
        for kind, part in magnitudes(model, torch.tensor([example.ids])).items():
            totals[kind].merge(part.top, part.counts)
    for kind, total in totals.items():
        for metric, number in total.values().items():
            yield Value("outliers", {"activation": kind, "metric": metric}, number)


def quantized(model: PreTrainedModel, examples: Sequence[Example]) -> Iterator[Value]:
    """Measure the accuracy with attention logits that are quantized as in `diffllama probe logit-bits`."""
    for bits in BITS:
        with watched(model, partial(quantized_attention, bits=bits)):
            yield Value("quantized logits", {"bits": bits}, accuracy(correct(model, examples)))


def order(model: PreTrainedModel, examples: Sequence[Example], orders: int) -> Iterator[Value]:
    """Measure the accuracy with the needles in several orders.

    `depends` is the share of the queries that are answered right in some orders and wrong in others, and `range` is the
    difference between the accuracies of the best and the worst order.
    """
    draw = random.Random(0)
    by_order = [
        list(chain.from_iterable(correct(model, [shuffled(example, draw) for example in examples])))
        for _ in range(orders)
    ]
    right = [sum(answers) for answers in zip(*by_order, strict=True)]
    accuracies = [fmean(answers) for answers in by_order]
    yield Value("order of needles", {"metric": "mean"}, fmean(accuracies))
    yield Value("order of needles", {"metric": "range"}, max(accuracies) - min(accuracies))
    yield Value("order of needles", {"metric": "depends"}, fmean(0 < count < orders for count in right))


def measure(model_folder: Path, settings: Mapping[str, Any], folder: Path) -> list[Value]:
    """Measure accuracy in every test, attention, outliers, quantized logits, and what the order of needles changes."""
    task = settings["recall"]
    model = model_spec(str(model_folder), device="cpu").load().model
    tests: dict[tuple[str, int, int], list[Example]] = {}
    for row in Dataset.from_parquet(str(folder / "tests.parquet"), cache_dir=str(folder / "cache")):
        example = Example(**row["example"])
        tests.setdefault((row["measure"], row["needles"], len(example.ids)), []).append(example)
    as_trained = next(examples for (test, *_), examples in tests.items() if test == AS_TRAINED)
    found = correct(model, as_trained)
    values = [
        Value(AS_TRAINED, {"of": "queries"}, accuracy(found)),
        Value(AS_TRAINED, {"of": "whole sequences"}, fmean(all(row) for row in found)),
    ]
    values += [
        Value(test, {"needles": needles, "length": length}, accuracy(correct(model, examples)))
        for (test, needles, length), examples in tests.items()
        if test != AS_TRAINED
    ]
    return [
        *values,
        *attention(model, as_trained),
        *outliers(model, as_trained[: task["outlier_sequences"]]),
        *quantized(model, as_trained),
        *order(model, as_trained, task["orders"]),
    ]


def draw(results: Mapping[str, Any], figure: Figure) -> None:
    """Draw the accuracies by needles, distractors and length, and the attention to the answer."""
    needles, distractors, length, attention = panels(figure, 4, rows=2)
    draw_means(needles, results, select(results, "accuracy by needles"), "needles")
    finish(needles, "needles, all asked", "accuracy")
    draw_means(distractors, results, select(results, "accuracy by needles, 4 asked"), "needles")
    finish(distractors, "needles, 4 of them asked", "accuracy")
    draw_means(length, results, select(results, "accuracy by length"), "length")
    length.set_xscale("log", base=2)
    finish(length, "length (tokens), 8 needles, 4 of them asked", "accuracy")
    draw_bars(attention, results, select(results, "attention", shares="signed"), "part")
    finish(attention, "tokens", "signed share of attention")
