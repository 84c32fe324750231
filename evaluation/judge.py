# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""A judge model behind an OpenAI-compatible endpoint, and the agreement of several judges."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, Omit, OpenAI


KEY = "OPENAI_API_KEY"
"""The environment variable with the endpoint's API key."""

RETRIES = 4
"""Maximum number of retries where the endpoint is busy (429), fails (5xx) or does not answer."""

CONCLUSION = r'conclusion["*_ ]*[:=\n–—-]'
"""Introduces a verdict."""

VERDICT = (
    r"(?:[\W_]|boxed|text(?:bf)?)*"
    r"(?:(?:it|(?:the|this) (?:proposed |final )?(?:response|summary|answer|decision|verdict)) is[\W_]+)?"
    r"(true|false)(?!\W*(?:(?:or|and)\W+)?(?:true|false))(?=[\W_]*?(?:[.,;:!(\n]|\s[–—-]|because|since|as\b|\Z))"
)
"""A verdict with the words that may precede it and the end of its clause: not "true or false", not "true in part"."""

Verdict = bool | None
"""Whether a judge finds a text accurate. `None` if its reply has no readable verdict."""


@dataclass(frozen=True)
class Judge:
    """A chat model that judges texts.

    Args:
        url: base URL of its endpoint, without `/chat/completions`.
        model: its name at the endpoint.
        timeout: of each reply, in seconds.

    Raises:
        ValueError: `url` is not an HTTP address, or it has a password or a query, which the results would reveal.
    """

    url: str
    model: str
    timeout: float = 120.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # malformed brackets or port
            address = False
        if not address or "@" in parts.netloc or parts.query:
            raise ValueError(
                "--judge-url must be the base address of an OpenAI-compatible endpoint, without password or query, "
                f"such as http://localhost:8000/v1, got {self.url!r}."
            )

    @cached_property
    def client(self) -> OpenAI:
        """Return the client of the endpoint."""
        key = os.environ.get(KEY) or "none"  # the client requires a key
        return OpenAI(base_url=self.url, api_key=key, timeout=self.timeout, max_retries=RETRIES)

    def ask(self, message: str) -> str:
        """Return the reply to a user message, at temperature 0.

        Raises:
            ConnectionError: the endpoint rejects the request, or does not answer it after all retries.
            ValueError: the reply is not a chat completion.
        """
        try:
            response = self.client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[{"role": "user", "content": message}],
                temperature=0,
                extra_headers={} if os.environ.get(KEY) else {"Authorization": Omit()},
            )
        except APIConnectionError as error:
            raise ConnectionError(f"The judge at {self.url} does not answer: {error}") from error
        except APIStatusError as error:
            hint = f" (set its key in the environment variable {KEY})" if error.status_code == 401 else ""
            reason = f"{error.status_code} {error.response.reason_phrase}, {error.response.text[:500]}"
            raise ConnectionError(f"The judge at {self.url} rejected the request: {reason}{hint}") from error
        try:
            return response.parse().choices[0].message.content or ""
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"The judge at {self.url} must send a chat completion, got {response.text[:500]!r}."
            ) from error


def verdict(reply: str) -> Verdict:
    """Read the verdict after the last "Conclusion:" of a reply: one word, or such as "the response is false"."""
    _, *conclusions = re.split(CONCLUSION, reply, flags=re.IGNORECASE)
    match = re.match(VERDICT, conclusions[-1], re.IGNORECASE) if conclusions else None
    return match[1].lower() == "true" if match else None


def agreement(verdicts: Sequence[Verdict]) -> float:
    """Compute the fraction of pairs of judges whose verdicts on one text are equal. Takes two or more verdicts."""
    count = len(verdicts)
    return sum(same * (same - 1) for same in Counter(verdicts).values()) / (count * (count - 1))


def fleiss_kappa(texts: Sequence[Sequence[Verdict]]) -> float | None:
    """Compute Fleiss' κ of the judges' verdicts on each text: 1 for full agreement, 0 for agreement by chance.

    Every text must have the same number of verdicts. `None` if all verdicts are equal or there are none: κ is then
    undefined.
    """
    counts = Counter(vote for verdicts in texts for vote in verdicts)
    chance = sum((count / counts.total()) ** 2 for count in counts.values())
    if len(counts) < 2:
        return None
    observed = sum(agreement(verdicts) for verdicts in texts) / len(texts)
    return (observed - chance) / (1 - chance)
