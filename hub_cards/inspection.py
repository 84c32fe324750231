# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a folder that may be hostile: every file, and the model that they make. None of its code runs.

Its chat templates do, in Jinja's sandbox, as transformers runs them. `inspect_with_limits` runs all of this.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.files import NAMES, TOKENIZER_FILES
from diffllama.checkpoints.json_files import read_json
from diffllama.checkpoints.models import expected_tensors
from diffllama.checkpoints.reading import Checkpoint, SafetensorsFile, check_tensors, nonfinite_tensors, open_checkpoint
from diffllama.hub_cards.cards import CARD, TASKS, card_metadata, read_card
from diffllama.hub_cards.code import (
    HubCodeError,
    differences,
    hub_code,
    is_package_code,
    package_code,
)
from diffllama.hub_cards.findings import Finding, note
from diffllama.hub_cards.model_files import check_file, entries, kind_of, sent_files
from diffllama.hub_cards.texts import has_place, strings
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


HIDDEN_CODE = dict.fromkeys(
    (
        *("custom_pipelines", "kernel_config", "attn_implementation"),
        *("_attn_implementation", "_attn_implementation_internal"),
        *("_experts_implementation", "_experts_implementation_internal"),
    ),
    "makes transformers run more",
)
"""Fields of config.json for which transformers fetches or runs more code than `auto_map` names."""

OTHER_WEIGHTS = "transformers_weights"
"""The field of config.json that names other weights than those that this package reads."""

DEFAULTS = {"is_causal": True}
"""Fields that may say what is so anyway."""

REFUSED_FIELDS = HIDDEN_CODE | {
    OTHER_WEIGHTS: "makes transformers load other weights",
    "is_causal": "makes attention look ahead in some implementations and not in others",
}
"""Fields that config.json must not have, and what they do."""

PYTHON_INTERNALS = {
    *("__builtins__", "__import__", "__loader__", "__spec__"),
    *(name for kind in (object, type, type(lambda: 0)) for name in (*dir(kind), *vars(type)) if name.startswith("__")),
}
"""Attributes by which a template would leave Jinja's sandbox."""


def inspect(folder: Path) -> Iterator[Finding | str]:
    """What is wrong with a folder, and what is good to know; before each file is read, its name."""
    torch.set_num_threads(1)  # threads of a process do not survive its fork
    broken = False
    for file in entries(folder):
        name = file.relative_to(folder).as_posix()
        for item in careful(name, "content", partial(check_file, file, folder)):
            broken |= isinstance(item, Finding) and item.rule in ("content", "json") and kind_of(name) is not None
            yield item
    yield from careful("*.py", "code", lambda: check_code(folder))
    if broken:
        return  # whoever reads these files now finds the same faults again
    config = None
    for item in careful("config.json", "config", lambda: load_config(folder)):
        if isinstance(item, DiffLlamaConfig):
            config = item
        else:
            yield item
    if config is None:
        return
    yield from careful("config.json", "config", lambda: check_config(folder))
    yield from careful(NAMES[0], "weights", lambda: check_weights(folder, config))
    yield from careful("tokenizer_config.json", "tokenizer", lambda: check_tokenizer(folder, config))
    yield from careful("generation_config.json", "generation", lambda: check_generation(folder, config))
    yield from careful(CARD, "card", lambda: check_card(folder))


def careful(name: str, rule: str, look: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """The name of a file and what a function finds in it, be it only that it fails."""
    yield name
    try:
        yield from look()
    except MemoryError:
        yield Finding(name, "takes too much memory to read", "limits")
    except Exception as error:  # a hostile file can fail anywhere; it is the folder that is wrong
        yield Finding(name, f"cannot be read: {one_line(error)}", rule)


def inspect_code(folder: Path) -> Iterator[Finding | str]:
    """The same of a folder's code alone."""
    yield from careful("*.py", "code", lambda: check_code(folder, others=False))
    for file in entries(folder):
        if file.parent == folder and file.name in package_code():
            yield from careful(file.name, "content", partial(check_file, file, folder))


def one_line(error: Exception) -> str:
    """An error of a library, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def check_code(folder: Path, others: bool = True) -> Iterator[Finding]:
    """Checks that the Hub's loader can follow the folder's code, and that it is the package's.

    With `others`, Python files that are not part of it are found too.
    """
    try:
        code = package_code() if is_package_code(folder) else hub_code(folder)
    except HubCodeError as error:
        for fault in error.faults:
            file, _, message = fault.partition(": ")
            yield Finding(file, message, "code")
        return
    for file, message in differences(code).items():
        how = "`diffllama export` writes the package's code"
        yield Finding(file, f"{message}. {how}; if the change is yours, allow it", "code-differs")
    for path in sent_files(folder) if others else ():
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".py" and name not in code:
            runs = ", and runs where this model is trusted to generate" * (name == "custom_generate/generate.py")
            yield Finding(name, f"belongs to none of the model's classes{runs}", "other-code")


def load_config(folder: Path) -> Iterator[DiffLlamaConfig | Finding]:
    """The configuration of a folder, or what is wrong with it."""
    name = "config.json"
    if not (folder / name).is_file():
        yield Finding(name, "is not there, so this is no model", "config")
        return
    content = read_json(folder / name)
    fields = [field for field in REFUSED_FIELDS if content.get(field) not in (None, DEFAULTS.get(field))]
    for field in fields:
        yield Finding(name, f"`{field}` {REFUSED_FIELDS[field]}: remove it", "config-field")
    if not HIDDEN_CODE.keys() >= set(fields):
        return  # the configuration refuses it too
    if content.get("model_type") != DiffLlamaConfig.model_type:
        must = f"`model_type` must be {DiffLlamaConfig.model_type!r}, got {content.get('model_type')!r}"
        yield Finding(name, must, "config")
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture_of(config)
    yield config


def check_config(folder: Path) -> Iterator[Finding]:
    """Checks that a configuration names the code of its folder and no other."""
    name, content = "config.json", read_json(folder / "config.json")
    present = content.get("auto_map")
    present = present if isinstance(present, dict) else {}
    for auto_class in AUTO_MAP | present:
        expected, actual = AUTO_MAP.get(auto_class), present.get(auto_class)
        if expected != actual:
            must = f"must have {auto_class}: {expected!r}" if expected else f"must not have {auto_class}"
            yield Finding(name, f"`auto_map` {must}, got {actual!r}", "auto-map")
    if content.get("quantization_config"):
        yield note(name, "`quantization_config`: it loads only where that quantization is installed", "config")


def architecture_of(config: PreTrainedConfig) -> str:
    """The name of the class of ours that a configuration is of. Raises `ValueError` if it is none."""
    architecture = (config.architectures or ["DifferentialLlamaForCausalLM"])[0]
    if architecture not in TASKS:
        raise ValueError(f"`architectures` in config.json must be one of {', '.join(TASKS)}, got {architecture!r}.")
    return architecture


def check_weights(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding | str]:
    """Checks the weights against the configuration, the index against them, and that all values are finite."""
    index = folder / f"{NAMES[0]}.index.json"
    single = folder / NAMES[0]
    if not (single.is_file() or index.is_file()):
        yield Finding(NAMES[0], "is not there, nor an index of its shards: `diffllama export` writes them", "weights")
        return
    name = NAMES[0] if single.is_file() else index.name
    quantized = getattr(config, "quantization_config", None) is not None
    used = {NAMES[0]} if single.is_file() else {index.name, *read_json(index)["weight_map"].values()}
    for path in sorted(folder.glob("model*.safetensors*")):
        if path.name not in used:
            yield Finding(path.name, "is not among the model's weights", "unknown-file")
    if quantized:
        return  # its tensors have the names, shapes and dtypes of its quantization
    try:
        checkpoint = open_checkpoint(folder)
        check_tensors(checkpoint.tensors, expected_tensors(config), str(folder))
    except (CheckpointError, OSError) as error:
        title, *faults = str(error).splitlines()
        for line in faults or [title]:
            file, _, fault = line.strip().partition(": ")
            if file.endswith(".safetensors"):  # in the words of `check_safetensors`, for it is the same fault
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
        yield name  # all weights together may take longer than the limit, a tensor may not
        for file in nonfinite_tensors(Checkpoint({tensor: home}, "")).values():
            yield Finding(file, f"{tensor} has NaN or infinite values", "non-finite")


def check_index(index: Path, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Checks what an index says of its shards."""
    content = read_json(index)
    homes = {
        tensor: file.path.name for tensor, (file, _) in checkpoint.homes.items() if isinstance(file, SafetensorsFile)
    }
    if content["weight_map"] != homes:
        differing = sorted(dict(content["weight_map"].items() ^ homes.items()))
        yield Finding(index.name, f"does not say where these tensors are: {', '.join(differing)}", "weights")
    size = content.get("metadata", {}).get("total_size")
    if size != (total := sum(tensor.nbytes for tensor in checkpoint.tensors.values())):
        yield Finding(index.name, f"`total_size` must be {total}, got {size}", "weights")


def check_tokenizer(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding | str]:
    """Checks that the tokenizer, if there is one, loads without code of its own and fits the vocabulary."""
    for file, template in chat_templates(folder):
        yield file
        yield from check_template(file, template)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield note("tokenizer.json", "is not there: save the tokenizer into the folder, if there is one", "tokenizer")
        return
    name = "tokenizer_config.json"
    yield name
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if len(tokenizer) > config.vocab_size:
        yield Finding(
            name, f"the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}", "tokenizer"
        )
    templates = tokenizer.chat_template
    for each in templates.values() if isinstance(templates, dict) else [templates] if templates else ():
        name = next((file for file, template in chat_templates(folder) if template == each), "chat_template.jinja")
        yield name
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], chat_template=each, tokenize=False)
        except (TemplateSyntaxError, SecurityError) as error:
            yield Finding(name, one_line(error), "template")
        except MemoryError:
            yield Finding(name, "takes too much memory to render", "limits")
        except Exception as error:  # a template may refuse a conversation
            yield note(name, f"refuses a greeting: {one_line(error)}", "template")


def chat_templates(folder: Path) -> Iterator[tuple[str, str]]:
    """The chat templates of a folder, and the files that they are in."""
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        settings = read_json(folder / name) if (folder / name).is_file() else {}
        template = settings.get("chat_template")
        named: list[Any] = template if isinstance(template, list) else [{"template": template}]
        texts = [entry.get("template") for entry in named]
        yield from ((name, text) for text in texts if isinstance(text, str))


def check_template(name: str, template: str) -> Iterator[Finding]:
    """Checks that a template does not reach for Python's internals, also where it is not rendered."""
    try:
        for line, kind, value in Environment().lex(template):
            if kind in ("name", "string") and value.strip("\"'") in PYTHON_INTERNALS:
                yield Finding(
                    name, f"line {line}: {value.strip()} is an attribute of Python's, not of a chat", "template"
                )
    except TemplateSyntaxError as error:
        yield Finding(name, one_line(error), "template")


def check_generation(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding]:
    """Checks the settings for generation."""
    file = folder / "generation_config.json"
    if file.is_file():
        settings = GenerationConfig.from_pretrained(folder)
        try:
            settings.validate(strict=True)
        except ValueError as error:  # published models have them too
            yield note(file.name, " ".join(str(error).split()), "generation")
    elif TASKS[architecture_of(config)].pipeline_tag == "text-generation":
        yield note(file.name, "is not there", "generation")


def check_card(folder: Path) -> Iterator[Finding]:
    """Checks that there is a card with metadata, and a licence."""
    if not any(folder.glob("LICENSE*")):
        yield note("LICENSE", "is not there", "licence")
    if not (folder / CARD).is_file():
        yield note(CARD, "is not there: `diffllama card` writes it", "card")
        return
    metadata = card_metadata(read_card(folder / CARD), CARD)
    for where, value in strings(metadata):
        if has_place(value, where.rpartition(".")[2]):
            yield Finding(CARD, f"`{where}` holds a path of a machine: {value[:80]!r}", "path")
    if not metadata.get("license"):
        yield note(CARD, "names no licence: `diffllama card --license` does", "licence")
