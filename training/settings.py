# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Read and check a pre-training file, as far as possible without importing torch."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from ruamel.yaml.error import YAMLError

from diffllama.configuration import read_yaml, recipe


MODEL_SOURCES = ("preset", "from", "baseline_from", "attn_implementation")
SOURCE = ("files", "dataset", "name", "split", "revision", "column", "max_tokens")


Whole = Annotated[
    int, BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
]
"""A whole number, which may be written as 2.0 or 1e3."""


class Section(BaseModel):
    """A section with typed fields. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Data(Section):
    """The section `data`, see `diffllama.training.pretraining.pretrain`."""

    files: str | list[str] | None = None
    dataset: str | None = None
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "text"
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    streaming: bool = False
    evaluation_sequences: Annotated[Whole, Field(ge=0)] = 0
    cache_dir: str | None = None

    @model_validator(mode="after")
    def check_streaming(self) -> "Data":
        """Refuse fields that a stream does not support."""
        if self.streaming and self.dataset is None:
            raise ValueError("`data.streaming` needs `data.dataset`, a repository or a folder.")
        if self.streaming and self.column == "input_ids":
            raise ValueError("`data.column` must have text with `data.streaming`, got 'input_ids', tokenized rows.")
        for name in {"files", "max_tokens", "cache_dir"} & self.model_fields_set if self.streaming else ():
            raise ValueError(f"`data.{name}` is not supported with `data.streaming`; remove one of them.")
        return self


class Pretraining(Section):
    """The sections of a pre-training file, including those of its recipe."""

    model: dict[str, Any]
    tokenizer: str
    data: Data
    sequence_length: Annotated[Whole, Field(ge=2)]
    tokens_per_step: Annotated[Whole, Field(ge=2)]
    training: dict[str, Any]


def validate(section: type[Section], values: Any, where: str) -> dict[str, Any]:
    """Return the checked values of a section, with floats such as 1e3 converted to integers.

    Raises `ValueError` that names the file and section (`where`), the first invalid field, its value and the rule.
    """
    try:
        return section.model_validate(values).model_dump(exclude_unset=True)
    except ValidationError as error:
        errors = error.errors()
        first, loc = errors[0], errors[0]["loc"][:2]
        *parents, name = map(str, loc)
        if first["type"] == "extra_forbidden":
            known = sorted(Data.model_fields if parents else section.model_fields)
            close = difflib.get_close_matches(name, known, 1)
            few = f" Known: {', '.join(known)}." if len(known) < 20 else ""
            hint = f"; did you mean `{close[0]}`?" if close else f".{few}"
            problem = "".join(f"`{parent}`: " for parent in parents) + f"there is no field `{name}`{hint}"
        elif first["type"] == "missing":
            problem = f"`{name}` is missing" + "; a `recipe` has one." * name.endswith(("step", "th"))
        elif first["type"] == "value_error":
            problem = str(first["ctx"]["error"])
        else:
            rules = (other["msg"].replace("Input should", "must") for other in errors if other["loc"][:2] == loc)
            rule = " or ".join(dict.fromkeys(rules))  # one for each allowed type
            problem = f"`{'.'.join([*parents, name])}` {rule}, got {first['input']!r}."
        raise ValueError(f"{where}: {problem}") from None


def check_fields(values: Mapping[str, Any], types: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check field names and numbers, given the types of all known fields. Returns and raises as `validate`."""
    numbers = {int: Whole, float: float}
    fields: dict[str, Any] = {name: (numbers.get(kind, Any), None) for name, kind in types.items()}
    return validate(create_model("Fields", __base__=Section, **fields), values, where)


def read_sections(path: Path) -> dict[str, Any]:
    """Read the sections of a pre-training file, which override those of its recipe.

    The fields of `model` and `training` are not checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not YAML, or a field is unknown, missing, invalid or in conflict with another.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Name a pre-training file, such as examples/pretrain.yaml.")
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n\nTo suppress")[0]  # that advice is to accept duplicate keys
        raise ValueError(f"{path} is not YAML: {reason}") from error
    if not isinstance(content, dict):
        names = ", ".join(["recipe", *Pretraining.model_fields])
        raise ValueError(f"{path} must have the sections {names}, got {type(content).__name__}.")
    settings = recipe(content.pop("recipe")) if "recipe" in content else {}
    if "num_train_epochs" in (content.get("training") or ()):
        settings.get("training", {}).pop("max_steps", None)  # the Trainer would prefer the recipe's
    for name, value in content.items():
        both = isinstance(value, dict) and name in settings
        settings[name] = settings[name] | value if both else value
    return validate(Pretraining, settings, str(path))
