# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""A pre-training file, as far as it can be read and checked without importing torch."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from diffllama.configuration import YamlLoader, recipe


SECTIONS = ("recipe", "model", "tokenizer", "data", "sequence_length", "tokens_per_step", "training")
MODEL_SOURCES = ("preset", "from", "baseline_from", "attn_implementation")
SOURCE = ("files", "dataset", "name", "split", "revision", "column", "max_tokens")
DATA = (*SOURCE, "streaming", "evaluation_sequences", "cache_dir")


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises `ValueError` for the first of the names that is not known."""
    known = sorted(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            few = f" Known: {', '.join(known)}." if len(known) < 20 else ""
            raise ValueError(
                f"{where}: there is no field `{name}`" + (f"; did you mean `{close[0]}`?" if close else "." + few)
            )


def read_sections(path: Path) -> dict[str, Any]:
    """The sections of a pre-training file over those of the recipe that it names.

    The fields of `model` and `training` are not checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no YAML, or another field is unknown, missing, of the wrong kind or against another.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), YamlLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must have the sections {', '.join(SECTIONS)}, got {type(content).__name__}.")
    check_names(content, SECTIONS, str(path))
    settings = recipe(content.pop("recipe")) if "recipe" in content else {}
    for name, value in content.items():
        sections = ("model", "data", "training")
        if name in sections and not isinstance(value, dict):
            raise ValueError(f"{path}: `{name}` must be a section with fields, got {value!r}.")
        if name == "training" and "num_train_epochs" in value:
            settings.get("training", {}).pop("max_steps", None)  # the recipe's would win
        settings[name] = {**settings.get(name, {}), **value} if name in sections else value
    for name in SECTIONS[1:]:
        if name not in settings:
            raise ValueError(f"{path}: `{name}` is missing" + "; a `recipe` has one." * (name.endswith(("step", "th"))))
    check_names(settings["data"], DATA, f"{path}: `data`")
    for where, section, least in (
        (str(path), settings, {"sequence_length": 2, "tokens_per_step": 2}),
        (f"{path}: `data`", settings["data"], {"max_tokens": 1, "evaluation_sequences": 0}),
    ):
        check_numbers(section, dict.fromkeys(least, int), where)
        for name, bound in least.items():
            if section.get(name, bound) < bound:
                raise ValueError(f"{where}: `{name}` must be {bound} at least, got {section[name]}.")
    streaming = settings["data"].setdefault("streaming", False)
    if not isinstance(streaming, bool):
        raise ValueError(f"{path}: `data.streaming` must be true or false, got {streaming!r}.")
    if streaming and "dataset" not in settings["data"]:
        raise ValueError(f"{path}: `data.streaming` needs `data.dataset`, a repository or a folder.")
    for name in ("files", "max_tokens", "cache_dir") if streaming else ():
        if name in settings["data"]:
            raise ValueError(f"{path}: `data.{name}` does not go with `data.streaming`; remove one of them.")
    return settings


def check_numbers(values: dict[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Makes whole numbers of 2.0 and 1e3 where whole ones belong, and refuses what is no number.

    Args:
        values: is changed.
        kinds: name -> `int` or `float`; names of other types are passed over.
        where: to tell where an error is.
    """
    for name, value in values.items():
        kind = kinds.get(name)
        if kind not in (int, float):
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (kind is int and not float(value).is_integer()):
            raise ValueError(f"{where}: `{name}` must be a {'whole ' * (kind is int)}number, got {value!r}.")
        values[name] = int(value) if kind is int else value
