# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Model cards, filled from facts, and updated without losing what somebody wrote into them.

The text of a card consists of sections between comments that nobody sees on the Hub. The comment that begins a section
has the SHA-256 of the text that was generated, so that an edit shows.
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
from jinja2 import Environment, PackageLoader, StrictUndefined
from yaml import YAMLError

from diffllama.checkpoints.models import AUTO_CLASSES
from diffllama.checkpoints.options import VARIANTS
from diffllama.checkpoints.versions import PACKAGE_URL
from diffllama.hub_cards.texts import has_place
from diffllama.hub_cards.training import training_rows


if TYPE_CHECKING:
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


class Task(NamedTuple):
    """What a model is for: the Hub's name of it, and what the model is."""

    pipeline_tag: str
    kind_of_model: str


TASKS = {
    "DifferentialLlamaForCausalLM": Task("text-generation", "language model"),
    "DifferentialLlamaForSequenceClassification": Task("text-classification", "classifier of texts"),
    "DifferentialLlamaForTokenClassification": Task("token-classification", "classifier of tokens"),
    "DifferentialLlamaForQuestionAnswering": Task("question-answering", "model for extractive question answering"),
    "DifferentialLlamaModel": Task("feature-extraction", "model without a head"),
}
"""Class of ours -> what it is for."""

CARD = "README.md"
"""What the Hub takes for a card."""

INHERITED = ("license", "license_name", "license_link", "language")
"""What a card's metadata says of a model and of those made from it."""

GENERATED = {"library_name", "pipeline_tag"}
"""What facts alone say in a card's metadata."""

_SECTION = re.compile(r"<!-- diffllama:(\w+) ([0-9a-f]{64}) -->\n(.*?)<!-- /diffllama:\1 -->\n?", re.DOTALL)
_PIN = re.compile(r"(?<=revision=\")[0-9a-f]{40}(?=\")|(?<=-revision )[0-9a-f]{40}\b")


@dataclass(frozen=True)
class Facts:
    """What a card tells of a model.

    Attributes:
        config: our configuration (of a conversion into another format, that of its source).
        parameters: how many numbers the weights have.
        dtype: of most of them, such as "bfloat16".
        architecture: the class that the weights belong to.
        chat: whether the tokenizer has a chat template.
        part: whether it is attention modules alone.
        conversion: conversion.json, see `conversion.engine.convert`.
        trained: whether the weights are other ones than the conversion made.
        training: training.json, see `training_record`.
        evaluation: evaluation.json, see `evaluation_rows`.
        code_licence: the file with the licence of the folder's code.
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
    def ours(self) -> bool:
        """Whether the folder is a model of ours, and not one converted into another format."""
        return self.conversion is None or self.conversion["result"]["format"] == self.config.model_type


def cache_bytes(facts: Facts, tokens: int, sliding: bool = False) -> int:
    """Bytes of keys and values of so many tokens in a cache, in the dtype of the weights.

    Args:
        facts: the model.
        tokens: how many.
        sliding: whether in its layers with a sliding window, or in those without one.
    """
    layer_type = "sliding_attention" if sliding else "full_attention"
    layers, heads, width = (facts.config.layer_types or []), facts.config.num_key_value_heads, facts.config.head_dim
    assert heads is not None  # set when the configuration is made, as is the next
    assert width is not None
    numbers = 2 * layers.count(layer_type) * heads * width * tokens
    return numbers * getattr(torch, facts.dtype).itemsize


def model_card(
    facts: Facts,
    name: str,
    metadata: Mapping[str, Any] | None = None,
    repo: str | None = None,
    revision: str | None = None,
) -> ModelCard:
    """The card of a model: of a converted, a fine-tuned or another trained one, as the facts say.

    Args:
        facts: what is known of it; what is not known is left out.
        name: what the card calls the model, where nothing better is known.
        metadata: what only people know, as in a card's metadata: `license`, `base_model`, `datasets`, `language`, …
            That of an older card stays in full, but for what the facts say.
        repo: the model's repository on the Hub, `owner/name`, for the code that loads it.
        revision: the full hash of the commit that this code is to load.
    """
    config, conversion, metadata = facts.config, facts.conversion, without_places(metadata or {})
    unilm = conversion is not None and conversion["result"]["format"].startswith("unilm")
    task = TASKS[facts.architecture]
    if conversion is not None and "revision" in conversion["source"]:
        metadata.setdefault("base_model", conversion["source"]["name"])
    if "base_model" in metadata:
        # The Hub has no word for a conversion; this is its word for a whole model with another one's weights.
        metadata.setdefault("base_model_relation", "finetune")
    if conversion is not None and facts.training is None and not facts.trained:
        template = "converted"
    else:
        template = "fine_tuned" if "base_model" in metadata else "trained"
    variants = [f"diff-{variant}" for variant in VARIANTS]
    known = ("diffllama", "differential-attention", f"diff-{config.diff_variant}")
    theirs = [tag for tag in as_list(metadata.get("tags")) if tag not in (*known, *variants)]
    metadata["tags"] = [*known, *theirs]
    if not facts.part and not unilm:
        metadata |= {"library_name": "transformers", "pipeline_tag": task.pipeline_tag}
    data = ModelCardData(**metadata)
    if facts.evaluation:
        new = [eval_result(row, task.pipeline_tag) for row in facts.evaluation]
        results = {measured(result): result for result in (*(data.eval_results or ()), *new)}
        data.model_name, data.eval_results = data.model_name or name, list(results.values())
    text = environment().get_template(f"{template}.md").render(
        section=section,
        facts=facts,
        source=conversion and conversion["source"],
        requirements=requirements(),
        package=f"[diffllama]({PACKAGE_URL})" if PACKAGE_URL else "diffllama",
        result=conversion and conversion["result"],
        check=conversion and conversion["verification"],
        config=config,
        metadata=metadata,
        name=name,
        repo=repo,
        revision=revision,
        pin=f', revision="{revision}"' if revision else "",
        trust=", trust_remote_code=True" if facts.ours else "",
        ours=facts.ours,
        task=task,
        auto_class=AUTO_CLASSES[facts.architecture],
        training=training_rows(facts.training or {}),
        harness=sorted({row["harness"] for row in facts.evaluation if "harness" in row}),
        bases=as_list(metadata.get("base_model")),
        datasets=as_list(metadata.get("datasets")),
        heads=config.num_attention_heads // 2,
        sliding=(config.layer_types or []).count("sliding_attention"),
        mebibytes=lambda tokens, sliding=False: f"{cache_bytes(facts, tokens, sliding) / 2**20:.4g}",
    )  # fmt: skip
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text.strip()}\n")


def without_places(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata without the paths of a machine, which peft's own cards have as base models and tags."""
    known = {}
    for name, value in metadata.items():
        kept = [each for each in value if not has_place(each)] if isinstance(value, list) else value
        if kept != [] and not has_place(kept):
            known[name] = kept
    return known


def requirements() -> list[str]:
    """The versions of torch and transformers that our code needs."""
    return sorted(line for line in requires("diffllama") or () if re.match(r"(torch|transformers)\b[^;]*$", line))


def inherited_metadata(card: Path) -> dict[str, Any]:
    """What the card of a model that another one is made from says of that one too: licence and languages."""
    try:
        text = read_card(card)
        metadata = ModelCard(text, ignore_metadata_errors=True).data.to_dict() if text else {}
    except (OSError, ValueError, YAMLError):  # none that can be read: nothing is known
        return {}
    return {name: metadata[name] for name in INHERITED if name in metadata}


def environment() -> Environment:
    """Where the templates are; a name that a template uses and nobody gives is an error."""
    templates = Environment(
        loader=PackageLoader("diffllama.hub_cards", ""), undefined=StrictUndefined, keep_trailing_newline=True
    )
    templates.filters["cell"] = cell
    return templates


def as_list(value: str | Sequence[str] | None) -> list[str]:
    """One, several or none, as a list."""
    return [value] if isinstance(value, str) else list(value or ())


def eval_result(row: Mapping[str, Any], task: str) -> EvalResult:
    """A row of evaluation.json for the metadata."""
    return EvalResult(
        task_type=task,
        dataset_type=row.get("dataset", row["task"]),
        dataset_name=row["task"],
        dataset_config=row.get("dataset_config"),
        dataset_split=row.get("split"),
        metric_type=row["metric"],
        metric_value=row["value"],
        metric_name=f"{row['metric']}, {row['shots']}-shot" if "shots" in row else row["metric"],
        source_name=f"lm-evaluation-harness {row['harness']}" if "harness" in row else None,
        source_url="https://github.com/EleutherAI/lm-evaluation-harness" if "harness" in row else None,
    )


def measured(result: EvalResult) -> tuple[Any, ...]:
    """What a result is of: another one of the same takes its place."""
    return *result.unique_identifier, result.dataset_name, result.metric_type, result.metric_name


def cell(value: Any) -> str:
    """A value for a cell of a table, whatever characters a name has."""
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "\\|")


def digest(text: str) -> str:
    """SHA-256 of a text, whatever its line endings and the blank lines around it."""
    return hashlib.sha256("\n".join(text.strip().splitlines()).encode()).hexdigest()


def section(name: str, caller: Callable[[], str]) -> str:
    """A section of a card; also an empty one, so that what is known later has a place."""
    text = re.sub(r"\n{3,}", "\n\n", caller().strip())
    body = f"{text}\n" if text else ""
    return f"<!-- diffllama:{name} {digest(text)} -->\n{body}<!-- /diffllama:{name} -->\n\n"


def front_and_body(text: str) -> tuple[str, str]:
    """The metadata of a card, as it is written, and the text behind it."""
    block = REGEX_YAML_BLOCK.search(text)
    return (block[2], text[block.end() :]) if block else ("", text)


def is_edited(match: re.Match[str]) -> bool:
    """Whether somebody has edited a section since it was generated."""
    return digest(match[3]) != match[2]


def written_by_hand(text: str) -> str:
    """What people wrote into a card, beside its metadata: sections that were edited, and text that is in none."""
    _, body = front_and_body(text)
    return _SECTION.sub(lambda match: match[0] if is_edited(match) else "", body).strip()


def pinned_revision(text: str) -> str | None:
    """The commit that the code in a card loads."""
    match = _PIN.search(text)
    return match and match[0]


def repinned(text: str, revision: str) -> str:
    """A card whose code loads another commit. Sections that somebody edited stay as they are."""

    def replace(match: re.Match[str]) -> str:
        if is_edited(match):
            return match[0]
        return section(match[1], lambda: _PIN.sub(revision, match[3])).removesuffix("\n")

    return _SECTION.sub(replace, text)


def updated_card(
    old: str,
    facts: Facts,
    name: str,
    metadata: Mapping[str, Any] | None = None,
    repo: str | None = None,
    revision: str | None = None,
    where: str = CARD,
) -> tuple[str, list[str]]:
    """The text of a card with new facts, see `model_card` and `updated`. Metadata that is given goes before the old.

    Raises:
        ValueError: the old card or the facts have something unexpected; the message says `where` the card is.
    """
    known = card_metadata(old, where) | dict(metadata or {})
    try:
        new = model_card(facts, name, known, repo, revision)
    except Exception as error:  # facts are from JSON files, which can have anything where something else is expected
        raise ValueError(
            f"No card can be made of {where} and conversion.json, training.json and evaluation.json beside it: one has "
            f"something unexpected: {type(error).__name__}: {error}"
        ) from error
    return updated(old, new)


def updated(old: str, new: ModelCard) -> tuple[str, list[str]]:
    """A card's text with new facts and with everything that somebody wrote into it.

    Sections that were generated and not edited since are replaced. Edited ones and text around them stay; sections
    that were removed stay away. A card that was not generated is kept before the new text. The metadata is the new
    card's, with the comments of the old one that have lines of their own.

    Args:
        old: the card as it is; may be empty.
        new: a card of `model_card`, made with the old one's metadata.

    Returns:
        The text, and the names of the sections that were kept because somebody had edited them.
    """
    sections = {match[1]: match[0] for match in _SECTION.finditer(new.text)}
    edited = []

    def replace(match: re.Match[str]) -> str:
        if is_edited(match):
            edited.append(match[1])
        return match[0] if match[1] in edited else sections.get(match[1], "")

    front, text = front_and_body(old)
    if _SECTION.search(text):
        text = _SECTION.sub(replace, text)
    else:
        text = f"{text.rstrip()}\n\n{new.text.lstrip()}" if text.strip() else new.text
    comments = [line for line in front.splitlines() if line.startswith("#")]
    head = "\n".join(("---", *comments, new.data.to_yaml(), "---"))
    return f"{head}\n\n{text.strip()}\n", edited


def settled_card(mine: str, theirs: str, here: str, there: str, otherwise: str) -> tuple[str, dict[str, Any]]:
    """Which of two cards is to be updated so that no text of people is lost, and the metadata of both.

    Args:
        mine, theirs: the two texts.
        here, there: where they are, for messages.
        otherwise: how to keep the first alone, for messages.

    Raises:
        ValueError: each has text of people, or metadata, that the other has not.
    """
    advice = f"Bring what {there} has into the one of {here}, or {otherwise}."
    written = [set(written_by_hand(text).splitlines()) for text in (mine, theirs)]
    if not (written[0] <= written[1] or written[1] <= written[0]):
        raise ValueError(f"People wrote different things into {CARD} of {here} and of {there}. {advice}")
    known, other = card_metadata(mine, f"{CARD} of {here}"), card_metadata(theirs, f"{CARD} of {there}")
    merged = other | known
    for name in known.keys() & other.keys() - GENERATED:
        if known[name] != other[name]:
            if not isinstance(known[name], list) and not isinstance(other[name], list):
                values = f"{known[name]!r} in {here} and {other[name]!r} in {there}"
                raise ValueError(f"`{name}` in {CARD} is {values}. {advice}")
            theirs_first = as_list(other[name])
            merged[name] = theirs_first + [value for value in as_list(known[name]) if value not in theirs_first]
    return (mine if written[1] <= written[0] else theirs), merged


def read_card(path: Path) -> str:
    """The text of a card; empty if there is none. Raises `ValueError` if it is no text."""
    try:
        return path.read_text(encoding="utf-8-sig") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def card_metadata(text: str, where: str) -> dict[str, Any]:
    """The metadata of a card's text. Raises `ValueError`, with where it stands, if it cannot be read.

    YAML's aliases are refused: a few lines of them can stand for more than any memory holds.
    """
    try:
        front, _ = front_and_body(text)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(front, yaml.SafeLoader)):
            raise ValueError("it has YAML aliases (*name): write the values out")
        return ModelCard(text).data.to_dict() if text.strip() else {}
    except (ValueError, TypeError, YAMLError) as error:
        raise ValueError(f"The metadata of {where} cannot be read: {' '.join(str(error).split())}") from error
