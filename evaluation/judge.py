# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""A language model that judges texts, behind an OpenAI-compatible endpoint, and how far several judges agree."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry


KEY = "OPENAI_API_KEY"
"""The environment variable with the endpoint's key."""

RETRIES = 4
"""So many more times an endpoint is asked that is busy, broken or silent."""

BACKOFF = 1.0
"""Seconds that the waiting times between them begin with; each is twice the last."""

CONCLUSION = r'conclusion["*_ ]*[:=\n–—-]'
"""What a verdict follows."""

SAYS = (
    r"(?:[\W_]|boxed|text(?:bf)?)*"
    r"(?:(?:it|(?:the|this) (?:proposed |final )?(?:response|summary|answer|decision|verdict)) is[\W_]+)?"
    r"(true|false)(?!\W*(?:(?:or|and)\W+)?(?:true|false))(?=[\W_]*?(?:[.,;:!(\n]|\s[–—-]|because|since|as\b|\Z))"
)
"""A verdict, with what may stand before it, and the end of its clause: not "true or false", not "true in part"."""

Verdict = bool | None
"""What a judge says; `None` if it cannot be read."""


@dataclass(frozen=True)
class Judge:
    """A chat model.

    Args:
        url: of the endpoint, without `/chat/completions`.
        model: its name there.
        timeout: seconds that a reply may take.

    Raises:
        ValueError: `url` is not an address of HTTP, or has a password or a query, which results would show.
    """

    url: str
    model: str
    timeout: float = 120.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # brackets or a port that are none
            address = False
        if not address or "@" in parts.netloc or parts.query:
            raise ValueError(
                "--judge-url must be the base address of an OpenAI-compatible endpoint, without password or query, "
                f"such as http://localhost:8000/v1, got {self.url!r}."
            )

    def ask(self, message: str) -> str:
        """The reply to a user's message, at temperature 0.

        Raises:
            ConnectionError: the endpoint refuses, or is busy, broken or silent after all retries.
            ValueError: it replies with something else than a chat completion.
        """

        def authorise(request: requests.PreparedRequest) -> requests.PreparedRequest:
            if key := os.environ.get(KEY):
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": 0,
        }
        retry = Retry(
            RETRIES,
            backoff_factor=BACKOFF,
            status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=None,
            raise_on_status=False,
        )
        with requests.Session() as session:
            session.mount(self.url, HTTPAdapter(max_retries=retry))
            try:
                response = session.post(
                    f"{self.url.rstrip('/')}/chat/completions", json=body, auth=authorise, timeout=self.timeout
                )
            except requests.RequestException as error:
                raise ConnectionError(f"The judge at {self.url} does not answer: {error}") from error
        if not response.ok:
            key = f" (its key is read from the environment variable {KEY})" if response.status_code == 401 else ""
            said = f"{response.status_code} {response.reason}, {response.text[:500]}"
            raise ConnectionError(f"The judge at {self.url} refuses: {said}{key}")
        try:
            return response.json()["choices"][0]["message"]["content"] or ""
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"The judge at {self.url} sent no chat completion: {response.text[:500]!r}") from error


def verdict(reply: str) -> Verdict:
    """What follows the last "Conclusion:" in a reply, as a word or as "the response is false"."""
    _, *found = re.split(CONCLUSION, reply, flags=re.IGNORECASE)
    said = re.match(SAYS, found[-1], re.IGNORECASE) if found else None
    return said[1].lower() == "true" if said else None


def agreement(verdicts: Sequence[Verdict]) -> float:
    """The share of pairs of judges, of two or more, whose verdicts on one text are the same."""
    count = len(verdicts)
    return sum(same * (same - 1) for same in Counter(verdicts).values()) / (count * (count - 1))


def fleiss_kappa(texts: Sequence[Sequence[Verdict]]) -> float | None:
    """Fleiss' κ of the verdicts of as many judges on each text: 1 if they agree, 0 if no more than by chance.

    `None` if all verdicts are the same, or there are none: chance alone makes judges agree then.
    """
    everything = Counter(one for verdicts in texts for one in verdicts)
    chance = sum((count / everything.total()) ** 2 for count in everything.values())
    if len(everything) < 2:
        return None
    observed = sum(agreement(verdicts) for verdicts in texts) / len(texts)
    return (observed - chance) / (1 - chance)
