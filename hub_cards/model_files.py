# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What files a model folder consists of, and whether each is what its name says."""

import io
import logging
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from picklescan.scanner import SafetyLevel, scan_pickle_bytes
from safetensors import SafetensorError, safe_open

from diffllama.checkpoints.files import leads_out
from diffllama.checkpoints.json_files import load_json
from diffllama.hub_cards.findings import Finding, note
from diffllama.hub_cards.secrets import SECRET_NAMES, secrets, text_of
from diffllama.hub_cards.texts import PLACES, has_place, strings, words


KINDS = {
    "json": (
        *("config.json", "generation_config.json", "model.safetensors.index.json", "chat_template.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
        *("tekken.json", "conversion.json", "training.json", "evaluation.json"),
    ),
    "text": (
        *("README.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "CITATION.cff", "merges.txt", "vocab.txt"),
        *("*.tiktoken", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    ),
    "sentencepiece": ("tokenizer.model*", "spiece.model", "sentencepiece.bpe.model"),
    "weights": ("model.safetensors", "model-*.safetensors"),
}
"""Kind of file -> the files of that kind that a model folder may have."""

SUFFIXES = {
    ".py": "code",
    ".png": "picture",
    ".jpg": "picture",
    ".jpeg": "picture",
    ".gif": "picture",
    ".webp": "picture",
}
"""Suffix -> kind of file that may be anywhere in a folder. Which code is the model's is for `check_code` to say."""

VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "added_tokens.json",
    "tekken.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
)
"""Files with tokens, which may look like paths and may be there twice."""

PICTURE = re.compile(
    rb"\x89PNG\r\n\x1a\n.*IEND\xaeB`\x82|\xff\xd8\xff.*\xff\xd9|GIF8[79]a.*;|RIFF....WEBP.*", re.DOTALL
)
"""PNG, JPEG, GIF and WebP, from beginning to end."""

ARCHIVES = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z", b"\x28\xb5\x2f\xfd": "zstd",
    b"Rar!": "rar", b"\x04\x22\x4d\x18": "lz4", b"PK\x03\x04": "zip",
}  # fmt: skip
"""How archives and compressed files begin; what is in them is not searched."""

PROGRAMS = {
    b"\x7fELF": "ELF", b"MZ": "Windows", b"\xcf\xfa\xed\xfe": "Mach-O", b"\xce\xfa\xed\xfe": "Mach-O",
    b"\xca\xfe\xba\xbe": "Mach-O or Java", b"\0asm": "WebAssembly", b"#!": "script", b"!<arch>": "library",
}  # fmt: skip
"""How programs begin."""

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".h5", ".keras")
"""Suffixes of files that are read by running what they say, or may be."""

LARGEST = 64 * 2**20
"""Bytes of a text that are read; vocabularies, the largest texts of a model, are smaller."""

ADAPTER = (
    "makes transformers load the model that the adapter names, and run that repository's code. Merge the adapter "
    "(merge_and_unload) or publish it in a repository of its own"
)

logging.getLogger("picklescan").setLevel(logging.CRITICAL)  # it warns of every file that is no pickle

NAMES_OF_ANYTHING = ("chat_template", "id2label", "label2id")
"""JSON fields that may hold what looks like a path."""

SHOWN = (".cache", ".git", ".gitattributes", ".gitignore", ".DS_Store")
"""Hidden files and folders that are not worth a note."""


def is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file, or a folder that it is in, is hidden."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def entries(folder: Path) -> Iterator[Path]:
    """Everything in a folder and below it that is no folder; links are not followed."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = sorted(name for name in folders if name not in SHOWN)
        yield from (Path(place, name) for name in sorted([*files, *links]) if name not in SHOWN)


def sent_files(folder: Path) -> list[Path]:
    """The files of a folder that `push` sends: all that are not hidden."""
    return [file for file in entries(folder) if file.is_file() and not is_hidden(file, folder)]


def kind_of(name: str) -> str | None:
    """Which of `KINDS` a file belongs to by its path in the folder, if any."""
    for kind, patterns in KINDS.items():
        if any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns):
            return kind
    return SUFFIXES.get(Path(name).suffix)


def check_file(file: Path, folder: Path) -> Iterator[Finding]:
    """Checks a file by itself: that it belongs into a model folder, is what its name says, and holds no secrets."""
    name = file.relative_to(folder).as_posix()
    if is_hidden(file, folder):
        yield note(name, "is hidden: `push` does not send it, other programs may", "hidden-file")
        return
    yield from (Finding(name, f"has a name that holds {secret}", "secret") for secret in secrets(name))
    if leads_out(file, folder):
        yield Finding(name, f"is a link out of the folder, to {os.path.realpath(file)}", "link")
        return
    if file.is_symlink() and not file.is_file():
        yield Finding(name, f"is a link to {'a folder' if file.is_dir() else 'nothing'}", "link")
        return
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        yield Finding(name, "is a pipe, socket or device", "special-file")
        return
    kind = kind_of(name)
    weights = file.suffix == ".safetensors"
    with file.open("rb") as opened:
        data = b"" if weights else opened.read(LARGEST if kind else LARGEST // 4)
    if file.name in ("adapter_config.json", "adapter_model.safetensors"):
        yield Finding(name, ADAPTER, "adapter")
    elif fault := what_runs(file, data, kind):
        yield Finding(name, *fault)
    elif kind is None:
        yield Finding(name, "is not part of a model folder", "unknown-file")
    if weights:
        yield from check_safetensors(file, name)
        return
    if kind is not None and status.st_size > LARGEST:
        yield Finding(name, f"has {status.st_size:,} bytes; at most {LARGEST:,} are read", "size")
    if message := content_fault(data, kind):
        yield Finding(name, message, "content")
    yield from check_text(name, data, kind)


def what_runs(file: Path, data: bytes, kind: str | None) -> tuple[str, str] | None:
    """What a file is that runs code or hides what it has, and the rule against it; `None` if it is no such file."""
    if file.suffix.lower() in PICKLES:
        return "is a pickle or may be one, which runs code when it is loaded", "pickle"
    for called in scan_pickle_bytes(io.BytesIO(data), file.name).globals:
        # the first words of a text can be read as names: those of what is known to be harmful are enough there
        identifiers = re.fullmatch(r"[\w.]+", called.module) and re.fullmatch(r"[\w.]+", called.name)
        if identifiers and (kind is None or called.safety is SafetyLevel.Dangerous):
            return f"is a pickle, which uses {called.module}.{called.name} when it is loaded", "pickle"
    if what := next((what for begin, what in PROGRAMS.items() if data.startswith(begin)), None):
        return f"is a program ({what})", "program"
    if what := next((what for begin, what in ARCHIVES.items() if data.startswith(begin)), None):
        return f"is an archive or compressed ({what}), so that nothing in it is searched", "archive"
    if zipfile.is_zipfile(file) or data[257:262] == b"ustar":
        return "is an archive, so that nothing in it is searched", "archive"
    return None


def content_fault(data: bytes, kind: str | None) -> str | None:
    """Why a file is not of its kind, or `None` if it is."""
    if kind in ("json", "text", "code"):
        return no_text(data)
    if kind == "picture" and not PICTURE.fullmatch(data):
        return "is no PNG, JPEG, GIF or WebP picture, or more than that"
    if kind == "sentencepiece" and no_text(data) and not is_sentencepiece(data):
        return "is neither a SentencePiece model nor text"
    return None


def no_text(data: bytes) -> str | None:
    """Why data are no text in UTF-8, or `None` if they are."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return f"is no text in UTF-8: {error}"
    controls = {character for character in text if character < " "} - set("\t\n\r\f\v")
    return f"is no text: it has the control character {min(controls)!r}" if controls else None


def is_sentencepiece(data: bytes) -> bool:
    """Whether data are a SentencePiece model: the fields of its protocol buffer, up to the last byte."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value, at

    at = 0
    try:
        while at < len(data):
            tag, at = number(at)
            if tag >> 3 not in range(1, 6) or tag & 7 != 2:  # pieces, specifications and test data, each with a length
                return False
            length, at = number(at)
            at += length
    except IndexError:
        return False
    return at == len(data) > 0


def check_safetensors(file: Path, name: str) -> Iterator[Finding]:
    """Checks that a file is safetensors to its last byte, and holds no secrets beside its tensors."""
    try:
        with safe_open(file, "pt") as opened:
            metadata, names = opened.metadata() or {}, opened.keys()
    except (SafetensorError, OSError) as error:
        yield Finding(name, f"cannot be read: {error}", "weights")
        return
    text = "\n".join([*names, *(f"{field}: {value}" for field, value in metadata.items())])
    yield from check_strings(name, text)


def check_text(name: str, data: bytes, kind: str | None) -> Iterator[Finding]:
    """Looks for secrets and paths of a machine in a file's text; the texts in JSON are read as JSON."""
    tokens = any(fnmatchcase(name, pattern) for pattern in VOCABULARIES)
    if kind == "json" or name.endswith((".json", ".ipynb")):
        try:
            content = load_json(data, unique=not tokens)
        except ValueError as error:
            yield Finding(name, f"is no JSON: {error}", "json")
        else:
            yield from check_json(name, content)
            return
    yield from check_strings(name, text_of(data), paths=not tokens and kind not in ("sentencepiece", "picture"))


def check_strings(name: str, text: str, paths: bool = True) -> Iterator[Finding]:
    """Looks for secrets and paths of a machine in a text."""
    yield from (Finding(name, f"holds {secret}", "secret") for secret in secrets(text))
    if paths and (match := PLACES.search(text)):
        line = text[match.start() : match.start() + 80].splitlines()[0]
        yield Finding(name, f"holds a path of a machine: {line!r}", "path")


def check_json(name: str, content: Any) -> Iterator[Finding]:
    """Checks what a JSON file says: that it names no code, and holds no secrets or paths of a machine."""
    if name == "tokenizer.json" and isinstance(content, dict):
        searched: Any = {field: value for field, value in content.items() if field not in ("model", "added_tokens")}
    else:
        searched = [] if any(fnmatchcase(name, pattern) for pattern in VOCABULARIES) else content
    if name != "config.json" and isinstance(content, dict) and "auto_map" in content:
        yield Finding(
            name, "`auto_map` names code of its own, which runs where the model's code is trusted", "auto-map"
        )
    yield from (Finding(name, f"holds {secret}", "secret") for secret in secrets("\n".join(words(content))))
    for where, value in strings(searched):
        field = where.rpartition(".")[2]
        if SECRET_NAMES.search(field) and value and not value.startswith("<"):
            yield Finding(name, f"`{where}` holds a secret", "secret")
        if has_place(value, field) and not any(known in where for known in NAMES_OF_ANYTHING):
            yield Finding(name, f"`{where}` holds a path of a machine: {value[:80]!r}", "path")
