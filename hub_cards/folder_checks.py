# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks every file of a folder, which may be hostile, and its model. None of its code runs.

Chat templates are rendered in Jinja's sandbox, as in transformers. `run_isolated` runs these checks.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from jinja2 import Environment
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.files import NAMES, TOKENIZER_FILES
from diffllama.checkpoints.json_files import read_json
from diffllama.checkpoints.models import expected_tensors
from diffllama.checkpoints.reading import Checkpoint, check_tensors, open_checkpoint
from diffllama.checkpoints.tensor_values import is_finite
from diffllama.hub_cards.cards import CARD, TASKS, parse_metadata, read_card
from diffllama.hub_cards.code import code_differences, folder_code, package_code
from diffllama.hub_cards.file_checks import check_file, kind_of, list_files, uploaded_files
from diffllama.hub_cards.findings import Check, Finding, Rule, T, note
from diffllama.hub_cards.sanitize import contains_local_path, json_strings
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


CODE_FIELDS = dict.fromkeys(
    (
        *("custom_pipelines", "kernel_config", "attn_implementation"),
        *("_attn_implementation", "_attn_implementation_internal"),
        *("_experts_implementation", "_experts_implementation_internal"),
    ),
    "makes transformers run more code",
)
"""Fields of config.json that make transformers download or run more code than `auto_map` names."""

FORBIDDEN_FIELDS = CODE_FIELDS | {
    "transformers_weights": "makes transformers load other weights",
    "is_causal": "makes attention look ahead in some implementations and not in others",
}
"""Field that config.json must not have -> its effect."""

HARMLESS_VALUES = {"is_causal": True}
"""Values of those fields that change nothing."""

PYTHON_INTERNALS = {
    *("__builtins__", "__import__", "__loader__", "__spec__"),
    *(name for kind in (object, type, type(lambda: 0)) for name in (*dir(kind), *vars(type)) if name.startswith("__")),
}
"""Attributes through which a template could leave Jinja's sandbox."""


def inspect_folder(folder: Path) -> Iterator[Finding | str]:
    """Yield all findings about a folder, and the name of each file before it is read."""
    torch.set_num_threads(1)  # threads do not survive the fork of their process
    unreadable = False
    for file in list_files(folder):
        name = file.relative_to(folder).as_posix()
        for item in guarded(name, "content", check_file(file, folder)):
            unreadable |= isinstance(item, Finding) and item.rule in ("content", "json") and kind_of(name) is not None
            yield item
    yield from guarded("*.py", "code", check_code(folder))
    if unreadable:
        return  # loading these files would repeat the errors
    config = yield from guarded("config.json", "config", load_config(folder))
    if config is None:
        return
    yield from guarded(NAMES[0], "weights", check_weights(folder, config))
    yield from guarded("tokenizer_config.json", "tokenizer", check_tokenizer(folder, config))
    yield from guarded("generation_config.json", "generation", check_generation(folder, config))
    yield from guarded(CARD, "card", check_card(folder))


def inspect_code(folder: Path) -> Iterator[Finding | str]:
    """Yield the findings about the folder's code only."""
    yield from guarded("*.py", "code", check_code(folder, other_files=False))
    for name in package_code():
        if (folder / name).is_file():
            yield from guarded(name, "content", check_file(folder / name, folder))


def guarded(name: str, rule: Rule, check: Check[T]) -> Check[T | None]:
    """Yield the name of a file, then the findings of a check. An exception of the check becomes a finding."""
    yield name
    try:
        return (yield from check)
    except MemoryError:
        yield Finding(name, "takes too much memory to read", "limits")
    except Exception as error:  # libraries raise any class for a hostile file
        yield Finding(name, f"cannot be read: {one_line(error)}", rule)
    return None


def one_line(error: Exception) -> str:
    """Format type and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_code(folder: Path, other_files: bool = True) -> Check[None]:
    """Check that transformers can load the folder's code from the Hub, and that it is the package's.

    With `other_files`, Python files that do not belong to the model are reported too.
    """
    code, faults = folder_code(folder)
    for file, fault in faults:
        yield Finding(file, fault, "code")
    if faults:
        return
    for file, message in code_differences(code).items():
        advice = "`diffllama export` writes the package's code; if the change is yours, allow it"
        yield Finding(file, f"{message}. {advice}", "code-differs")
    for path in uploaded_files(folder) if other_files else ():
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".py" and name not in code:
            runs = ", and runs when this model is trusted to generate" * (name == "custom_generate/generate.py")
            yield Finding(name, f"does not belong to the model{runs}", "other-code")


def load_config(folder: Path) -> Check[DiffLlamaConfig | None]:
    """Load a folder's configuration, which must name only the code of its folder."""
    name = "config.json"
    if not (folder / name).is_file():
        yield Finding(name, "is missing, so this is not a model", "config")
        return None
    content = read_json(folder / name)
    fields = [field for field in FORBIDDEN_FIELDS if content.get(field) not in (None, HARMLESS_VALUES.get(field))]
    for field in fields:
        yield Finding(name, f"`{field}` {FORBIDDEN_FIELDS[field]}: remove it", "config-field")
    if not CODE_FIELDS.keys() >= set(fields):
        return None  # the configuration class refuses these fields too
    if content.get("model_type") != DiffLlamaConfig.model_type:
        types = f"{DiffLlamaConfig.model_type!r}, got {content.get('model_type')!r}"
        yield Finding(name, f"`model_type` must be {types}", "config")
        return None
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture_of(config)
    auto_map = content.get("auto_map")
    auto_map = auto_map if isinstance(auto_map, dict) else {}
    for auto_class in AUTO_MAP | auto_map:
        expected, actual = AUTO_MAP.get(auto_class), auto_map.get(auto_class)
        if expected != actual:
            rule = f"must have {auto_class}: {expected!r}" if expected else f"must not have {auto_class}"
            yield Finding(name, f"`auto_map` {rule}, got {actual!r}", "auto-map")
    if content.get("quantization_config"):
        yield note(name, "`quantization_config`: loads only where that quantization is installed", "config")
    return config


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the model class of a configuration. Raises `ValueError` if it is not a diffllama class."""
    architecture = (config.architectures or ["DifferentialLlamaForCausalLM"])[0]
    if architecture not in TASKS:
        raise ValueError(f"`architectures` in config.json must be one of {', '.join(TASKS)}, got {architecture!r}.")
    return architecture


def check_weights(folder: Path, config: DiffLlamaConfig) -> Check[None]:
    """Check the weights against the configuration and the index, and that all values are finite."""
    index, single = folder / f"{NAMES[0]}.index.json", folder / NAMES[0]
    if not (single.is_file() or index.is_file()):
        yield Finding(NAMES[0], "is missing, and so is an index of shards: `diffllama export` writes them", "weights")
        return
    name = NAMES[0] if single.is_file() else index.name
    used = {NAMES[0]} if single.is_file() else {index.name, *read_json(index)["weight_map"].values()}
    for path in sorted(folder.glob("model*.safetensors*")):
        if path.name not in used:
            yield Finding(path.name, "is not among the model's weights", "unknown-file")
    if getattr(config, "quantization_config", None) is not None:
        return  # its tensors have the names, shapes and dtypes of its quantization
    try:
        checkpoint = open_checkpoint(folder)
        check_tensors(checkpoint.tensors, expected_tensors(config), str(folder))
    except (CheckpointError, OSError) as error:
        title, *faults = str(error).splitlines()
        for line in faults or [title]:
            file, _, fault = line.strip().partition(": ")
            if file.endswith(".safetensors"):  # worded as in `check_safetensors`, which finds the same fault
                yield Finding(file, f"cannot be read: {fault}", "weights")
            else:
                yield Finding(name, line.strip(), "weights")
        return
    if not single.is_file():
        yield from check_index(index, checkpoint)
    if not config.dtype or {tensor.dtype for tensor in checkpoint.tensors.values()} != {config.dtype}:
        dtypes = sorted({str(tensor.dtype) for tensor in checkpoint.tensors.values()})
        yield note(name, f"has {', '.join(dtypes)}, and `dtype` in config.json is {config.dtype}", "weights")
    for tensor, home in checkpoint.homes.items():
        yield name  # the time limit is for each tensor, not for all of them
        if not all(map(is_finite, home.pieces())):
            yield Finding(home.path.name, f"{tensor} has NaN or infinite values", "non-finite")


def check_index(index: Path, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Check that an index agrees with its shards."""
    content = read_json(index)
    homes = {tensor: home.path.name for tensor, home in checkpoint.homes.items()}
    if content["weight_map"] != homes:
        tensors = sorted(dict(content["weight_map"].items() ^ homes.items()))
        yield Finding(index.name, f"names the wrong shard for these tensors: {', '.join(tensors)}", "weights")
    size = content.get("metadata", {}).get("total_size")
    if size != (total := sum(tensor.nbytes for tensor in checkpoint.tensors.values())):
        yield Finding(index.name, f"`total_size` must be {total}, got {size}", "weights")


def check_tokenizer(folder: Path, config: DiffLlamaConfig) -> Check[None]:
    """Check that the tokenizer, if there is one, loads without its own code and fits the vocabulary."""
    templates = chat_templates(folder)
    for template, file in templates.items():
        yield file
        yield from check_template(file, template)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield note("tokenizer.json", "is missing: save the tokenizer into the folder, if there is one", "tokenizer")
        return
    name = "tokenizer_config.json"
    yield name
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if len(tokenizer) > config.vocab_size:
        message = f"the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}"
        yield Finding(name, message, "tokenizer")
    greeting = [{"role": "user", "content": "Hello"}]
    for template, file in templates.items():
        yield file
        try:
            tokenizer.apply_chat_template(greeting, chat_template=template, tokenize=False)
        except (TemplateSyntaxError, SecurityError) as error:
            yield Finding(file, one_line(error), "template")
        except MemoryError:
            yield Finding(file, "takes too much memory to render", "limits")
        except Exception as error:  # a template may refuse a conversation
            yield note(file, f"refuses a greeting: {one_line(error)}", "template")


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder, and the first file with each."""
    templates: dict[str, str] = {}
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if path.is_file():
            templates.setdefault(path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix())
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(folder / name).get("chat_template") if (folder / name).is_file() else None
        named = template if isinstance(template, list) else [{"template": template}]
        for text in (entry.get("template") for entry in named):
            if isinstance(text, str):
                templates.setdefault(text, name)
    return templates


def check_template(name: str, template: str) -> Iterator[Finding]:
    """Check that a template does not use Python's internals, even where it is not rendered."""
    try:
        for line, kind, value in Environment().lex(template):
            if kind in ("name", "string") and value.strip("\"'") in PYTHON_INTERNALS:
                yield Finding(name, f"line {line}: {value.strip()} is an internal attribute of Python", "template")
    except TemplateSyntaxError as error:
        yield Finding(name, one_line(error), "template")


def check_generation(folder: Path, config: DiffLlamaConfig) -> Check[None]:
    """Check the generation settings."""
    file = folder / "generation_config.json"
    if file.is_file():
        settings = GenerationConfig.from_pretrained(folder)
        try:
            settings.validate(strict=True)
        except ValueError as error:  # published models also have contradictory settings
            yield note(file.name, " ".join(str(error).split()), "generation")
    elif TASKS[architecture_of(config)].pipeline_tag == "text-generation":
        yield note(file.name, "is missing", "generation")


def check_card(folder: Path) -> Check[None]:
    """Check that there is a card with metadata, and a licence."""
    if not any(folder.glob("LICENSE*")):
        yield note("LICENSE", "is missing", "licence")
    if not (folder / CARD).is_file():
        yield note(CARD, "is missing: `diffllama card` writes it", "card")
        return
    metadata = parse_metadata(read_card(folder / CARD), CARD)
    for where, value in json_strings(metadata):
        if contains_local_path(value, where.rpartition(".")[2]):
            yield Finding(CARD, f"`{where}` is or contains a local path: {value[:80]!r}", "path")
    if not metadata.get("license"):
        yield note(CARD, "names no licence: `diffllama card --license` does", "licence")
