# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Secrets in texts: the patterns of detect-secrets and of keys that it lacks, where what they match looks random."""

import importlib
import inspect
import math
import re
from collections import Counter
from functools import cache


PLUGINS = (
    *("aws", "azure_storage_key", "basic_auth", "discord", "github_token", "gitlab_token", "jwt", "npm"),
    *("openai", "pypi_token", "sendgrid", "slack", "square_oauth", "stripe", "telegram_token", "twilio"),
)
"""Modules of detect-secrets with patterns. Those that take any hash for a secret are left out."""

MORE = {
    "Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,})",
    "Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "Weights & Biases key": r"(?i)wandb[\w.\-\"': =]{0,40}?\b[0-9a-f]{40}\b|\bwandb_v1_\w{40,}",
    "private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d",
}
"""What other secrets look like."""

NAMES = r"(?:(?:hub|hf|auth|access|api|bearer|secret|private)[_-]?(?:token|key)|secret(?:[_-]?key)?|password|passwd)"
"""Names of variables and fields whose values are secrets."""

SECRET_NAMES = re.compile(rf"(?i){NAMES}$")
"""Names of JSON fields whose values are secrets."""

ASSIGNED = re.compile(rf"(?i){NAMES}[\"']?[ \t]*[:=][ \t]*[\"']?([^\s\"'<>{{}}()$,;]{{8,}})")
"""Such a name with a value, in YAML, code or settings of a shell."""

BASIC_AUTH = "Basic Auth Credentials"
PLACEHOLDERS = re.compile(r"(?i)(?:user(?:name)?|pass(?:word|wd)?|pwd|token|secret|key|your\W?\w*|x+|\*+|\.+)$")
"""What stands for a password in examples."""


@cache
def patterns() -> list[tuple[str, re.Pattern[str]]]:
    """What a secret is, and what it looks like."""
    known = [(what, re.compile(pattern)) for what, pattern in MORE.items()]
    for plugin in PLUGINS:
        module = importlib.import_module(f"detect_secrets.plugins.{plugin}")
        for detector in vars(module).values():
            if inspect.isclass(detector) and detector.__module__ == module.__name__:
                fields = vars(detector)
                known += [(fields["secret_type"], pattern) for pattern in fields.get("denylist", ())]
    return known


def entropy(text: str) -> float:
    """Shannon entropy of a text's characters, in bits."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())


def looks_random(text: str) -> bool:
    """Whether a text has a run of letters and digits with the entropy of a key: words and placeholders have less."""
    run = max(re.findall(r"[A-Za-z0-9]+", text), key=len, default="")
    mixed = any(c.isdigit() for c in run) and any(c.isalpha() for c in run)
    return len(run) >= 16 and entropy(run) >= (3 if mixed else 3.8)


def is_secret(what: str, match: re.Match[str]) -> bool:
    """Whether what a pattern matched is likely a secret."""
    if what == "private key":
        return True
    if what == BASIC_AUTH:
        return not PLACEHOLDERS.match(match[1])
    return looks_random(match[0])


def secrets(text: str) -> list[str]:
    """The secrets in a text, by what they are and how they begin; each kind once."""
    found: dict[str, str] = {}
    for what, pattern in patterns():
        for match in pattern.finditer(text):
            if is_secret(what, match):
                found.setdefault(match[0][:6], f"{article(what)} {what} ({match[0][:6]}…)")
                break
    for match in ASSIGNED.finditer(text):
        if looks_random(match[1]) and not any(match[1].startswith(begin) for begin in found):
            found.setdefault(match[1][:3], f"a password or key ({match[0].split(match[1])[0].strip()} {match[1][:3]}…)")
    return list(found.values())


def article(noun: str) -> str:
    """The indefinite article of a noun."""
    return "an" if noun[0] in "AEIOaeio" else "a"


def text_of(data: bytes) -> str:
    """The text of a file in UTF-8, or, where much of it is zero, in UTF-16 or UTF-32."""
    if 4 * data.count(0) >= len(data):
        return data.replace(b"\0", b"").decode("latin-1")
    return data.decode("utf-8", errors="replace")
