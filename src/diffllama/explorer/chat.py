# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers of a model, token by token, with their speed."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from diffllama.evaluation.models import LoadedModel


Messages = Sequence[dict[str, str]]
"""A conversation: `role` and `content` of each message."""

WAIT = 120.0
"""Longest time between two pieces of an answer, in seconds."""


@dataclass(frozen=True)
class Answer:
    """What a model has answered so far.

    Args:
        text: the answer.
        tokens: how many it has.
        speed: tokens per second after the first one; `None` before the second.
    """

    text: str
    tokens: int
    speed: float | None

    def __str__(self) -> str:
        """State the number of tokens and their speed."""
        return f"{self.tokens} token{'s' * (self.tokens != 1)}" + (
            "" if self.speed is None else f", {self.speed:.1f} tokens/s"
        )


class Progress(StoppingCriteria):
    """Counts the tokens of an answer, and stops it once `stopped` is set."""

    def __init__(self) -> None:
        self.stopped = Event()
        self.tokens = 0
        self.first = self.last = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Count a token. Returns whether each sequence is to stop."""
        self.tokens += 1
        self.last = time.perf_counter()
        self.first = self.first or self.last
        return torch.full((len(input_ids),), self.stopped.is_set(), device=input_ids.device)

    @property
    def speed(self) -> float | None:
        """Tokens per second after the first."""
        return (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 else None


def prompt(loaded: LoadedModel, messages: Messages) -> tuple[list[int], int | None]:
    """Encode a conversation in the model's chat template, or its last message if there is no template.

    Returns:
        The token ids, and how many tokens remain in the model's context; `None` if it has no limit.

    Raises:
        ValueError: the conversation fills the context.
    """
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template:
        ids = loaded.encode(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    else:
        ids = loaded.prefix + loaded.encode(messages[-1]["content"])
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and len(ids) >= context:
        raise ValueError(
            f"The conversation has {len(ids):,} tokens, and the context of {loaded.name} {context:,}. Begin a new "
            "conversation."
        )
    return ids, None if context is None else context - len(ids)


def answer(loaded: LoadedModel, messages: Messages, temperature: float, max_tokens: int) -> Iterator[Answer]:
    """Generate the answer to a conversation. The generation stops when the iterator is closed.

    Args:
        loaded: the model.
        messages: the conversation; the last message is the user's.
        temperature: of sampling; 0 for the likeliest tokens.
        max_tokens: most tokens of the answer. It also ends where the context ends.

    Raises:
        ValueError: the conversation fills the model's context, or the generation fails.
    """
    asked, remaining = prompt(loaded, messages)
    ids = loaded.tensor(asked)
    streamer = TextIteratorStreamer(loaded.tokenizer, skip_prompt=True, timeout=WAIT, skip_special_tokens=True)
    progress, errors = Progress(), list[Exception]()
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}

    def generate() -> None:
        try:
            loaded.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens if remaining is None else min(max_tokens, remaining),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([progress]),
                pad_token_id=loaded.tokenizer.pad_token_id or loaded.tokenizer.eos_token_id,
                **sampling,
            )
        except Exception as error:
            errors.append(error)
            streamer.end()

    thread = Thread(target=generate, daemon=True)
    thread.start()
    text = ""
    try:
        for piece in streamer:
            text += piece
            yield Answer(text, progress.tokens, progress.speed)
    finally:
        progress.stopped.set()
        thread.join()
    if errors:
        raise ValueError(f"{loaded.name} could not answer: {type(errors[0]).__name__}.") from errors[0]
    yield Answer(text, progress.tokens, progress.speed)
