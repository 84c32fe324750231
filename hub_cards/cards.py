# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Model cards: generated from facts, and updated without losing what people wrote into them.

A card's text consists of sections between HTML comments, which the Hub does not show. The opening comment has the
SHA-256 of the generated text, so that an edit is noticed.
"""

import hashlib
import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from yaml import YAMLError

from diffllama.checkpoints.models import AUTO_CLASSES
from diffllama.checkpoints.options import VARIANTS
from diffllama.checkpoints.versions import PACKAGE_URL
from diffllama.hub_cards.sanitize import contains_local_path
from diffllama.hub_cards.training_record import training_rows


if TYPE_CHECKING:
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


class Task(NamedTuple):
    """Task of a model class: the Hub's name for it, and the name of such a model in a card."""

    pipeline_tag: str
    kind_of_model: str


TASKS = {
    "DifferentialLlamaForCausalLM": Task("text-generation", "language model"),
    "DifferentialLlamaForSequenceClassification": Task("text-classification", "classifier of texts"),
    "DifferentialLlamaForTokenClassification": Task("token-classification", "classifier of tokens"),
    "DifferentialLlamaForQuestionAnswering": Task("question-answering", "model for extractive question answering"),
    "DifferentialLlamaModel": Task("feature-extraction", "model without a head"),
}
"""Model class -> its task."""

CARD = "README.md"
"""File that the Hub shows as the model card."""

INHERITED = ("license", "license_name", "license_link", "language")
"""Metadata that also holds for models derived from a model."""

GENERATED = {"library_name", "pipeline_tag"}
"""Metadata that is always generated."""

_SECTION = re.compile(r"<!-- diffllama:(\w+) ([0-9a-f]{64}) -->\n(.*?)<!-- /diffllama:\1 -->\n?", re.DOTALL)
_PIN = re.compile(r"(?<=revision=\")[0-9a-f]{40}(?=\")|(?<=-revision )[0-9a-f]{40}\b")


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model for its card.

    Attributes:
        config: diffllama configuration; for a model converted into another format, that of its source.
        parameters: number of parameters.
        dtype: dtype of most weights, such as "bfloat16".
        architecture: model class of the weights.
        chat: whether the tokenizer has a chat template.
        part: whether there are only attention modules.
        conversion: conversion.json, see `conversion.engine.convert`.
        trained: whether the weights have changed since the conversion.
        training: training.json, see `training_record`.
        evaluation: evaluation.json, see `evaluation_rows`.
        code_licence: name of the file with the licence of the folder's code.
    """

    config: "DiffLlamaConfig"
    parameters: int
    dtype: str
    architecture: str = "DifferentialLlamaForCausalLM"
    chat: bool = False
    part: bool = False
    conversion: Mapping[str, Any] | None = None
    trained: bool = False
    training: Mapping[str, Any] | None = None
    evaluation: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    code_licence: str = "LICENSE"

    @property
    def is_diffllama(self) -> bool:
        """Whether the folder has a diffllama model, and not one converted into another format."""
        return self.conversion is None or self.conversion["result"]["format"] == self.config.model_type

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values in the cache for a token in a layer, in the dtype of the weights."""
        heads, width = self.config.num_key_value_heads, self.config.head_dim
        assert heads is not None  # both are set by the configuration's constructor
        assert width is not None
        return 2 * heads * width * getattr(torch, self.dtype).itemsize


def model_card(
    facts: ModelFacts,
    name: str,
    metadata: Mapping[str, Any] | None = None,
    repo: str | None = None,
    revision: str | None = None,
) -> ModelCard:
    """Return the card of a model that was converted, fine-tuned or trained from scratch, according to the facts.

    Args:
        facts: the facts; unknown ones are left out.
        name: the title, unless the model was converted.
        metadata: metadata that the facts do not imply: `license`, `base_model`, `datasets`, `language`, … All
            metadata of an older card can be given; what the facts imply replaces it.
        repo: the model's repository on the Hub, `owner/name`, for the example code.
        revision: the full hash of the commit that the example code loads.
    """
    config, conversion, metadata = facts.config, facts.conversion, without_local_paths(metadata or {})
    loadable = conversion is None or conversion["result"]["format"] in (config.model_type, "transformers")
    task = TASKS[facts.architecture]
    if conversion is not None and "revision" in conversion["source"]:
        metadata.setdefault("base_model", conversion["source"]["name"])
    if "base_model" in metadata:
        # The Hub has no relation for conversions; this is the one for full weights derived from another model
        metadata.setdefault("base_model_relation", "finetune")
    if conversion is not None and facts.training is None and not facts.trained:
        kind = "converted"
    else:
        kind = "fine_tuned" if "base_model" in metadata else "trained"
    tags = ["diffllama", "differential-attention", f"diff-{config.diff_variant}"]
    generated = {*tags, *(f"diff-{variant}" for variant in VARIANTS)}
    metadata["tags"] = tags + [tag for tag in as_list(metadata.get("tags")) if tag not in generated]
    if not facts.part and loadable:
        metadata |= {"library_name": "transformers", "pipeline_tag": task.pipeline_tag}
    data = ModelCardData(**metadata)
    if facts.evaluation:
        new = [eval_result(row, task.pipeline_tag) for row in facts.evaluation]
        results = {
            (*result.unique_identifier, result.dataset_name, result.metric_type, result.metric_name): result
            for result in (*(data.eval_results or ()), *new)
        }  # a new result replaces an old one of the same
        data.model_name, data.eval_results = data.model_name or name, list(results.values())
    text = template(kind).render(
        facts=facts,
        config=config,
        source=conversion and conversion["source"],
        result=conversion and conversion["result"],
        check=conversion and conversion["verification"],
        training=training_rows(facts.training or {}),
        harness=sorted({row["harness"] for row in facts.evaluation if "harness" in row}),
        metadata=metadata,
        bases=as_list(metadata.get("base_model")),
        datasets=as_list(metadata.get("datasets")),
        name=name,
        repo=repo,
        revision=revision,
        pin=f', revision="{revision}"' if revision else "",
        trust=", trust_remote_code=True" if facts.is_diffllama else "",
        task=task,
        auto_class=AUTO_CLASSES[facts.architecture],
        package=f"[diffllama]({PACKAGE_URL})" if PACKAGE_URL else "diffllama",
        requirements=requirements(),
        sliding=(config.layer_types or []).count("sliding_attention"),
        attention="grouped differential attention" if config.signals_per_noise > 1 else "differential attention",
        lambda_init=described_lambda_init(config.lambda_init),
        polynorm=config.hidden_act == "poly_norm",
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text.strip()}\n")


def described_lambda_init(given: str | float | list[float]) -> str:
    """Describe λ_init of all layers, given the field of the configuration."""
    if isinstance(given, list):
        return f"{', '.join(f'{value:.4g}' for value in given)} in layers 1 to {len(given)}"
    return "0.8 - 0.6·exp(-0.3·(l - 1)) in layer l" if given == "exponential" else str(given)


def without_local_paths(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata without local paths, which peft writes as base models and tags."""
    kept = {}
    for name, value in metadata.items():
        values = [item for item in value if not contains_local_path(item)] if isinstance(value, list) else value
        if values != [] and not contains_local_path(values):
            kept[name] = values
    return kept


def requirements() -> list[str]:
    """Return the versions of torch and transformers that our code needs."""
    return sorted(line for line in requires("diffllama") or () if re.match(r"(torch|transformers)\b[^;]*$", line))


def inherited_metadata(card: Path) -> dict[str, Any]:
    """Return the metadata of a card that also holds for models derived from it: licence and languages."""
    try:
        text = read_card(card)
        metadata = ModelCard(text, ignore_metadata_errors=True).data.to_dict() if text else {}
    except (OSError, ValueError, YAMLError):  # the card cannot be read
        return {}
    return {name: metadata[name] for name in INHERITED if name in metadata}


def template(name: str) -> Template:
    """Load a template of cards. A variable that is not defined is an error."""
    environment = Environment(
        loader=PackageLoader("diffllama.hub_cards", ""), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["cell"] = table_cell
    environment.globals["section"] = section
    return environment.get_template(f"{name}.md")


def as_list(value: str | Sequence[str] | None) -> list[str]:
    """Return one value, several or none as a list."""
    return [value] if isinstance(value, str) else list(value or ())


def eval_result(row: Mapping[str, Any], task: str) -> EvalResult:
    """Convert a row of evaluation.json for the metadata."""
    harness = row.get("harness")
    return EvalResult(
        task_type=task,
        dataset_type=row.get("dataset", row["task"]),
        dataset_name=row["task"],
        dataset_config=row.get("dataset_config"),
        dataset_split=row.get("split"),
        metric_type=row["metric"],
        metric_value=row["value"],
        metric_name=f"{row['metric']}, {row['shots']}-shot" if "shots" in row else row["metric"],
        source_name=harness and f"lm-evaluation-harness {harness}",
        source_url=harness and "https://github.com/EleutherAI/lm-evaluation-harness",
    )


def table_cell(value: Any) -> str:
    """Escape a value for a cell of a Markdown table."""
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "\\|")


def digest(text: str) -> str:
    """Compute the SHA-256 of a text, regardless of line endings and of blank lines around it."""
    return hashlib.sha256("\n".join(text.strip().splitlines()).encode()).hexdigest()


def section(name: str, caller: Callable[[], str]) -> str:
    """Format a section of a card. Empty sections are kept as places for later facts."""
    text = re.sub(r"\n{3,}", "\n\n", caller().strip())
    body = f"{text}\n" if text else ""
    return f"<!-- diffllama:{name} {digest(text)} -->\n{body}<!-- /diffllama:{name} -->\n\n"


def split_front_matter(text: str) -> tuple[str, str]:
    """Split a card into its YAML and the text after it."""
    block = REGEX_YAML_BLOCK.search(text)
    return (block[2], text[block.end() :]) if block else ("", text)


def is_edited(match: re.Match[str]) -> bool:
    """Whether somebody has edited a section since it was generated."""
    return digest(match[3]) != match[2]


def handwritten_text(text: str) -> str:
    """Return the text that people wrote into a card: edited sections, and text outside of sections."""
    _, body = split_front_matter(text)
    return _SECTION.sub(lambda match: match[0] if is_edited(match) else "", body).strip()


def pinned_revision(text: str) -> str | None:
    """Return the commit that the example code of a card loads."""
    match = _PIN.search(text)
    return match and match[0]


def pin_revision(text: str, revision: str) -> str:
    """Make the example code of a card load another commit. Edited sections stay unchanged."""

    def replace(match: re.Match[str]) -> str:
        if is_edited(match):
            return match[0]
        return section(match[1], lambda: _PIN.sub(revision, match[3])).removesuffix("\n")

    return _SECTION.sub(replace, text)


def updated_card(
    old: str,
    facts: ModelFacts,
    name: str,
    metadata: Mapping[str, Any] | None = None,
    repo: str | None = None,
    revision: str | None = None,
    where: str = CARD,
) -> tuple[str, list[str]]:
    """Update a card with new facts, see `model_card`, and keep everything that people wrote into it.

    Generated sections are replaced unless they were edited. Text around them stays. Removed sections stay removed. The
    text of a card without generated sections is kept before the new text. `metadata` replaces the old card's; YAML
    comments on lines of their own stay.

    Returns:
        The text, and the names of the sections that were kept because they had been edited.

    Raises:
        ValueError: the old card or the facts have unexpected content; the message says `where` the card is.
    """
    known = parse_metadata(old, where) | dict(metadata or {})
    try:
        new = model_card(facts, name, known, repo, revision)
    except Exception as error:  # facts come from JSON files, which can contain any types
        raise ValueError(
            f"No card can be generated from {where}, conversion.json, training.json and evaluation.json: one of them "
            f"has unexpected content: {type(error).__name__}: {error}"
        ) from error
    sections = {match[1]: match[0] for match in _SECTION.finditer(new.text)}
    front, text = split_front_matter(old)
    edited = [match[1] for match in _SECTION.finditer(text) if is_edited(match)]
    if _SECTION.search(text):
        text = _SECTION.sub(lambda match: match[0] if match[1] in edited else sections.get(match[1], ""), text)
    else:
        text = f"{text.rstrip()}\n\n{new.text.lstrip()}" if text.strip() else new.text
    comments = [line for line in front.splitlines() if line.startswith("#")]
    front = "\n".join(("---", *comments, new.data.to_yaml(), "---"))
    return f"{front}\n\n{text.strip()}\n", edited


def merge_cards(card: str, other: str, place: str, other_place: str, alternative: str) -> tuple[str, dict[str, Any]]:
    """Choose which of two cards to update so that no handwritten text is lost, and merge their metadata.

    `place`, `other_place`, and `alternative`, a way to keep only the first, are for messages.

    Raises:
        ValueError: each has handwritten text, or metadata, that the other lacks.
    """
    advice = f"Merge the changes from {other_place} into {place}/{CARD}, or {alternative}."
    lines, other_lines = (set(handwritten_text(text).splitlines()) for text in (card, other))
    if not (lines <= other_lines or other_lines <= lines):
        raise ValueError(f"The handwritten texts in {CARD} of {place} and of {other_place} differ. {advice}")
    metadata, others = parse_metadata(card, f"{CARD} of {place}"), parse_metadata(other, f"{CARD} of {other_place}")
    merged = others | metadata
    for name in metadata.keys() & others.keys() - GENERATED:
        value, other_value = metadata[name], others[name]
        if value == other_value:
            continue
        if not isinstance(value, list) and not isinstance(other_value, list):
            raise ValueError(
                f"`{name}` in {CARD} is {value!r} in {place} and {other_value!r} in {other_place}. {advice}"
            )
        others_first = as_list(other_value)
        merged[name] = others_first + [item for item in as_list(value) if item not in others_first]
    return (card if other_lines <= lines else other), merged


def read_card(path: Path) -> str:
    """Read a card, "" if there is none. Raises `ValueError` if it is not text."""
    try:
        return path.read_text(encoding="utf-8-sig") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from error


def parse_metadata(text: str, where: str) -> dict[str, Any]:
    """Parse the metadata of a card's text. Raises `ValueError` with the card's place, `where`, if it is not valid.

    YAML aliases are refused: a few lines of them can expand to more than fits into memory.
    """
    try:
        front, _ = split_front_matter(text)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(front, yaml.SafeLoader)):
            raise ValueError("it has YAML aliases (*name): write the values out")
        return ModelCard(text).data.to_dict() if text.strip() else {}
    except (ValueError, TypeError, YAMLError) as error:
        raise ValueError(f"The metadata of {where} cannot be read: {' '.join(str(error).split())}") from error
