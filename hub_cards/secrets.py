# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Secrets in texts: random-looking matches of detect-secrets' patterns and of some that it lacks."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class


BASIC_AUTH = "Basic Auth Credentials"
DETECT_SECRETS = (
    *("AWS Access Key", "Azure Storage Account access key", BASIC_AUTH, "Discord Bot Token", "GitHub Token"),
    *("GitLab Token", "JSON Web Token", "NPM tokens", "OpenAI Token", "PyPI Token", "SendGrid API Key"),
    *("Slack Token", "Square OAuth Secret", "Stripe Access Key", "Telegram Bot Token", "Twilio API Key"),
)
"""Types of detect-secrets that are searched. Those left out match any hash."""

PRIVATE_KEY = "private key"
MORE = {
    "Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "Weights & Biases key": r"(?i)wandb[\w.\-\"': =]{0,40}?\b[0-9a-f]{40}\b|\bwandb_v1_\w{40,}",
    PRIVATE_KEY: r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d",
}
"""Type of secret -> pattern, where detect-secrets has none or a narrower one."""

NAMES = r"(?:(?:hub|hf|auth|access|api|bearer|secret|private)[_-]?(?:token|key)|secret(?:[_-]?key)?|password|passwd)"
SECRET_FIELDS = re.compile(rf"(?i){NAMES}$")
"""Names of JSON fields whose values are secrets."""

ASSIGNMENTS = re.compile(rf"(?i){NAMES}[\"']?[ \t]*[:=][ \t]*[\"']?([^\s\"'<>{{}}()$,;]{{8,}})")
"""Such a name with a value, in YAML, code or shell settings."""

PLACEHOLDERS = re.compile(r"(?i)(?:user(?:name)?|pass(?:word|wd)?|pwd|token|secret|key|your\W?\w*|x+|\*+|\.+)$")
"""Passwords of examples."""


@cache
def patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Return pairs of a type of secret and a pattern."""
    detectors: dict[str, Any] = get_mapping_from_secret_type_to_class()
    known = [(secret_type, re.compile(pattern)) for secret_type, pattern in MORE.items()]
    return known + [(name, pattern) for name in DETECT_SECRETS for pattern in vars(detectors[name])["denylist"]]


def looks_random(text: str) -> bool:
    """Whether the longest run of letters and digits has the entropy of a key. Words and placeholders have less."""
    run = max(re.findall(r"[A-Za-z0-9]+", text), key=len, default="")
    entropy = -sum(
        count / len(run) * math.log2(count / len(run)) for count in Counter(run).values()
    )  # bits per character
    mixed = any(c.isdigit() for c in run) and any(c.isalpha() for c in run)
    return len(run) >= 16 and entropy >= (3 if mixed else 3.8)


def is_secret(secret_type: str, match: re.Match[str]) -> bool:
    """Whether the match of a pattern is likely a secret."""
    if secret_type == BASIC_AUTH:
        return not PLACEHOLDERS.match(match[1])
    return secret_type == PRIVATE_KEY or looks_random(match[0])


def find_secrets(text: str) -> Iterator[str]:
    """Describe the secrets in a text by type and first characters, each type once."""
    starts: set[str] = set()
    for secret_type, pattern in patterns():
        match = next((match for match in pattern.finditer(text) if is_secret(secret_type, match)), None)
        if match is not None and match[0][:6] not in starts:
            starts.add(match[0][:6])
            yield f"a secret: {secret_type} ({match[0][:6]}…)"
    for match in ASSIGNMENTS.finditer(text):
        if looks_random(match[1]) and not match[1].startswith(tuple(starts)):
            starts.add(match[1][:3])
            yield f"a secret: {match[0].split(match[1])[0].strip()} {match[1][:3]}…"


def decode(data: bytes) -> str:
    """Decode a file as UTF-8, or as UTF-16 or UTF-32 if at least a quarter of its bytes are zero."""
    if 4 * data.count(0) >= len(data):
        return data.replace(b"\0", b"").decode("latin-1")
    return data.decode("utf-8", errors="replace")
