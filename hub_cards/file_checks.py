# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The files of a model folder, and whether the content of each matches its name."""

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
from diffllama.hub_cards.findings import Check, Finding, Rule, note
from diffllama.hub_cards.sanitize import LOCAL_PATH, contains_local_path, json_strings, json_words
from diffllama.hub_cards.secrets import SECRET_FIELDS, decode, find_secrets


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
"""Kind of file -> names of such files in a model folder."""

SUFFIXES = {".py": "code"} | dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".webp"), "picture")
"""Suffix -> kind of file that may be anywhere in a folder. `check_code` decides which code belongs to the model."""

VOCABULARIES = (
    *("tokenizer.json", "vocab.json", "added_tokens.json", "tekken.json"),
    *("vocab.txt", "merges.txt", "*.tiktoken"),
)
"""Files with tokens, which may look like paths and be repeated."""

PICTURE = re.compile(
    rb"\x89PNG\r\n\x1a\n.*IEND\xaeB`\x82|\xff\xd8\xff.*\xff\xd9|GIF8[79]a.*;|RIFF....WEBP.*", re.DOTALL
)
"""PNG, JPEG, GIF and WebP, from beginning to end."""

SENTENCEPIECE_FIELD = re.compile(rb"[\x0a\x12\x1a\x22\x2a]([\x80-\xff]{,8}[\0-\x7f])")
"""Tag and length of a protocol buffer's field: pieces, specifications or test data of a SentencePiece model."""

ARCHIVES = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z", b"\x28\xb5\x2f\xfd": "zstd",
    b"Rar!": "rar", b"\x04\x22\x4d\x18": "lz4", b"PK\x03\x04": "zip",
}  # fmt: skip
PROGRAMS = {
    b"\x7fELF": "ELF", b"MZ": "Windows", b"\xcf\xfa\xed\xfe": "Mach-O", b"\xce\xfa\xed\xfe": "Mach-O",
    b"\xca\xfe\xba\xbe": "Mach-O or Java", b"\0asm": "WebAssembly", b"#!": "script", b"!<arch>": "library",
}  # fmt: skip
"""First bytes -> format."""

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".h5", ".keras")
"""Suffixes of formats that can execute code when they are loaded."""

MAX_TEXT_BYTES = 64 * 2**20
"""Bytes of a text that are read. Vocabularies, the largest texts of a model, are smaller."""

ADAPTER = (
    "makes transformers load the adapter's base model, and run the code of that repository. Merge the adapter "
    "(merge_and_unload) or publish it in a repository of its own"
)

TEXT_FIELDS = ("chat_template", "id2label", "label2id")
"""JSON fields whose values may look like paths."""

IGNORED = (".cache", ".git", ".gitattributes", ".gitignore", ".DS_Store")
"""Hidden files and folders that are not reported."""

logging.getLogger("picklescan").setLevel(logging.CRITICAL)  # it warns about every file that is not a pickle


def is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file or one of its parent folders is hidden."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def list_files(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder and its subfolders that is not a folder. Links are not followed."""
    for parent, subfolders, files in os.walk(folder):
        links = [name for name in subfolders if os.path.islink(os.path.join(parent, name))]
        subfolders[:] = sorted(name for name in subfolders if name not in IGNORED)
        yield from (Path(parent, name) for name in sorted([*files, *links]) if name not in IGNORED)


def uploaded_files(folder: Path) -> list[Path]:
    """Return the files of a folder that `push` uploads: all that are not hidden."""
    return [file for file in list_files(folder) if file.is_file() and not is_hidden(file, folder)]


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its path within the folder, see `KINDS` and `SUFFIXES`."""
    for kind, patterns in KINDS.items():
        if any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns):
            return kind
    return SUFFIXES.get(Path(name).suffix)


def check_file(file: Path, folder: Path) -> Check[None]:
    """Check that a file belongs in a model folder, matches its name, and contains no secrets or local paths."""
    name = file.relative_to(folder).as_posix()
    if is_hidden(file, folder):
        yield note(name, "is hidden: `push` does not upload it, other programs may", "hidden-file")
        return
    yield from (Finding(name, f"its name contains {secret}", "secret") for secret in find_secrets(name))
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
        data = b"" if weights else opened.read(MAX_TEXT_BYTES if kind else MAX_TEXT_BYTES // 4)
    if file.name in ("adapter_config.json", "adapter_model.safetensors"):
        yield Finding(name, ADAPTER, "adapter")
    elif fault := forbidden_format(file, data, kind):
        yield Finding(name, *fault)
    elif kind is None:
        yield Finding(name, "is not part of a model folder", "unknown-file")
    if weights:
        yield from check_safetensors(file, name)
        return
    if kind is not None and status.st_size > MAX_TEXT_BYTES:
        yield Finding(name, f"has {status.st_size:,} bytes; only {MAX_TEXT_BYTES:,} are searched", "size")
    if message := content_mismatch(data, kind):
        yield Finding(name, message, "content")
    yield from check_text(name, data, kind)


def forbidden_format(file: Path, data: bytes, kind: str | None) -> tuple[str, Rule] | None:
    """Return message and rule for a pickle, program or archive; `None` for other files."""
    if file.suffix.lower() in PICKLES:
        return "has the suffix of a pickle, which can execute code when it is loaded", "pickle"
    for imported in scan_pickle_bytes(io.BytesIO(data), file.name).globals:
        # The first words of a text can be read as names: in known texts only those known to be harmful count
        identifiers = re.fullmatch(r"[\w.]+", imported.module) and re.fullmatch(r"[\w.]+", imported.name)
        if identifiers and (kind is None or imported.safety is SafetyLevel.Dangerous):
            return f"is a pickle, which uses {imported.module}.{imported.name} when it is loaded", "pickle"
    if program := next((name for start, name in PROGRAMS.items() if data.startswith(start)), None):
        return f"is a program ({program})", "program"
    archive = next((name for start, name in ARCHIVES.items() if data.startswith(start)), None)
    if archive or zipfile.is_zipfile(file) or data[257:262] == b"ustar":
        return f"is an archive or compressed ({archive or 'zip or tar'}), which is not searched", "archive"
    return None


def content_mismatch(data: bytes, kind: str | None) -> str | None:
    """Return why a file is not of its kind, or `None` if it is."""
    if kind in ("json", "text", "code"):
        return text_error(data)
    if kind == "picture" and not PICTURE.fullmatch(data):
        return "is not a PNG, JPEG, GIF or WebP picture, or has bytes beyond its end"
    if kind == "sentencepiece" and text_error(data) and not is_sentencepiece(data):
        return "is neither a SentencePiece model nor text"
    return None


def text_error(data: bytes) -> str | None:
    """Return why data are not text in UTF-8, or `None` if they are."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return f"is not text in UTF-8: {error}"
    controls = {character for character in text if character < " "} - set("\t\n\r\f\v")
    return f"is not text: it has the control character {min(controls)!r}" if controls else None


def is_sentencepiece(data: bytes) -> bool:
    """Whether data are a SentencePiece model: the fields of its protocol buffer, to the last byte."""
    at = 0
    while field := SENTENCEPIECE_FIELD.match(data, at):
        length = sum((byte & 127) << 7 * i for i, byte in enumerate(field[1]))
        at = field.end() + length
    return at == len(data) > 0


def check_safetensors(file: Path, name: str) -> Iterator[Finding]:
    """Check that a file is safetensors to its last byte, and has no secrets or local paths in its header."""
    try:
        with safe_open(file, "np") as opened:  # "pt" maps the whole file as memory, beyond the limit
            metadata, names = opened.metadata() or {}, opened.keys()
    except (SafetensorError, OSError) as error:
        yield Finding(name, f"cannot be read: {error}", "weights")
        return
    yield from check_string(name, "\n".join([*names, *(f"{field}: {value}" for field, value in metadata.items())]))


def check_text(name: str, data: bytes, kind: str | None) -> Iterator[Finding]:
    """Search a file for secrets and local paths; JSON is parsed, so that escapes hide nothing."""
    is_vocabulary = any(fnmatchcase(name, pattern) for pattern in VOCABULARIES)
    if kind == "json" or name.endswith((".json", ".ipynb")):
        try:
            content = load_json(data, unique=not is_vocabulary)
        except ValueError as error:
            yield Finding(name, f"is not valid JSON: {error}", "json")
        else:
            yield from check_json(name, content, is_vocabulary)
            return
    yield from check_string(name, decode(data), not is_vocabulary and kind not in ("sentencepiece", "picture"))


def check_string(name: str, text: str, search_paths: bool = True) -> Iterator[Finding]:
    """Search a text for secrets and local paths."""
    yield from (Finding(name, f"contains {secret}", "secret") for secret in find_secrets(text))
    if search_paths and (match := LOCAL_PATH.search(text)):
        line = text[match.start() : match.start() + 80].splitlines()[0]
        yield Finding(name, f"contains a local path: {line!r}", "path")


def check_json(name: str, content: Any, is_vocabulary: bool) -> Iterator[Finding]:
    """Search a JSON file for secrets, local paths and references to code."""
    if name != "config.json" and isinstance(content, dict) and "auto_map" in content:
        yield Finding(name, "`auto_map` names code, which runs where the model's code is trusted", "auto-map")
    yield from check_string(name, "\n".join(json_words(content)), search_paths=False)
    if name == "tokenizer.json" and isinstance(content, dict):
        content = {field: value for field, value in content.items() if field not in ("model", "added_tokens")}
    elif is_vocabulary:
        return
    for where, value in json_strings(content):
        field = where.rpartition(".")[2]
        if SECRET_FIELDS.search(field) and value and not value.startswith("<"):
            yield Finding(name, f"`{where}` is a secret", "secret")
        if contains_local_path(value, field) and not any(known in where for known in TEXT_FIELDS):
            yield Finding(name, f"`{where}` is or contains a local path: {value[:80]!r}", "path")
