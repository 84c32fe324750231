# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a folder is fit for the Hub. Nothing in it is run."""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig
from yaml import YAMLError

from diffllama.conversion.checkpoints import PICKLES, SafetensorsFile, open_checkpoint, open_file
from diffllama.conversion.transformers_models import TOKENIZER_FILES, expected_tensors
from diffllama.conversion.weight_map import CheckpointError, check_tensors
from diffllama.hub_cards.cards import TASKS
from diffllama.hub_cards.code import HubCodeError, differences, hub_code
from diffllama.hub_cards.texts import PLACES, SECRET_NAMES, is_absolute_path, secrets, strings
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


PICKLE_SUFFIXES = (*PICKLES, ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz")
"""Files that are read by running what they say, or may be."""

TEXTS = (".md", ".txt", ".py", ".jinja", ".yaml", ".yml", ".toml", ".sh")


class FolderError(ValueError):
    """A folder is not fit for the Hub. The message lists what is wrong with it, a line each."""


@dataclass(frozen=True)
class Finding:
    """Something about a folder.

    Attributes:
        file: the file that it is about.
        message: what it is.
        wrong: whether the folder must not be published so; otherwise it is good to know.
    """

    file: str
    message: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


def finding(line: str, wrong: bool = True) -> Finding:
    """What a line says of a file, which it begins with."""
    file, _, message = line.partition(": ")
    return Finding(file, message, wrong)


def check(folder: Path) -> list[Finding]:
    """What is wrong with a folder that is to be published, and what is good to know about it.

    Every file loads, by what is installed here and never by the folder's own code; the code is the package's, or how
    it differs; the weights are those that the configuration asks for; there are no pickles, secrets, or paths of a
    machine.

    Args:
        folder: the folder, with a model of ours.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder. Name a folder with a model.")
    findings = [*check_files(folder), *check_code(folder)]
    config = load_config(folder)
    if isinstance(config, Finding):
        return [*findings, config]
    return [
        *findings,
        *check_weights(folder, config),
        *check_tokenizer(folder, config),
        *check_generation(folder, config),
        *check_card(folder),
    ]


def sent_files(folder: Path) -> list[Path]:
    """The files of a folder that are published: all that are not hidden."""
    files = (file for file in folder.rglob("*") if file.is_file() or file.is_symlink())
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def check_files(folder: Path) -> Iterator[Finding]:
    """Checks every file by itself: that it can be read, holds no pickle, no secret and no path of a machine."""
    for file in sent_files(folder):
        name = file.relative_to(folder).as_posix()
        if not file.is_file():
            yield Finding(name, "is a link to nothing")
        elif is_pickle(file):
            yield Finding(name, "is a pickle, which runs code when it is loaded. Weights are safetensors only")
        elif file.suffix == ".json":
            yield from (Finding(name, message) for message in json_faults(file))
        elif file.suffix in TEXTS or file.name.startswith(("LICENSE", "NOTICE")):
            text = file.read_bytes().decode(errors="replace")
            yield from (Finding(name, f"holds {secret}") for secret in secrets(text))
        elif file.suffix == ".safetensors":
            try:
                open_file(file)
            except (SafetensorError, ValueError, OSError) as error:
                yield Finding(name, f"cannot be read: {error}")


def is_pickle(file: Path) -> bool:
    """Whether a file is a pickle, by its name or by how it begins."""
    if file.suffix.lower() in PICKLE_SUFFIXES:
        return True
    with file.open("rb") as opened:
        begin = opened.read(4)
    if begin == b"PK\3\4" and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return begin[:1] == b"\x80" and begin[1:2] in (b"\2", b"\3", b"\4", b"\5")


def json_faults(file: Path) -> Iterator[str]:
    """What is wrong with a JSON file: that it is none, or holds secrets or paths of a machine."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        yield f"is no JSON: {error}"
        return
    if file.name == "tokenizer.json" and isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in ("model", "added_tokens")}
    elif file.name in ("vocab.json", "added_tokens.json"):
        return  # tokens may look like anything
    for where, value in strings(content):
        yield from (f"`{where}` holds {secret}" for secret in secrets(value))
        if SECRET_NAMES.search(where) and value and not value.startswith("<"):
            yield f"`{where}` holds a secret"
        if is_absolute_path(value) or PLACES.search(value):
            yield f"`{where}` holds a path of a machine: {value[:80]!r}"


def check_code(folder: Path) -> Iterator[Finding]:
    """Checks that the Hub's loader can follow the folder's code, and compares it with the package's."""
    try:
        code = hub_code(folder)
    except HubCodeError as error:
        yield from (finding(line.strip()) for line in str(error).splitlines()[1:])
        return
    yield from (finding(line, wrong=False) for line in differences(code))
    for file in sent_files(folder):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".py" and name not in code:
            runs = ", and runs where this model is trusted to generate" * (name == "custom_generate/generate.py")
            yield Finding(name, f"belongs to none of the model's classes{runs}", wrong=False)


def load_config(folder: Path) -> DiffLlamaConfig | Finding:
    """The configuration of a folder, or what is wrong with it."""
    name = "config.json"
    if not (folder / name).is_file():
        return Finding(name, "is not there, so this is no model")
    try:
        content = json.loads((folder / name).read_bytes())
        if content.get("model_type") != DiffLlamaConfig.model_type:
            return Finding(
                name, f"`model_type` must be {DiffLlamaConfig.model_type!r}, got {content.get('model_type')!r}"
            )
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        architecture_of(config)
    except Exception as error:  # of transformers, for whatever it is that is wrong
        return Finding(name, " ".join(f"{type(error).__name__}: {error}".split()))
    for auto_class, reference in AUTO_MAP.items():
        if content.get("auto_map", {}).get(auto_class) != reference:
            got = content.get("auto_map", {}).get(auto_class)
            return Finding(name, f"`auto_map` must have {auto_class}: {reference!r}, got {got!r}")
    return config


def architecture_of(config: PreTrainedConfig) -> str:
    """The name of the class of ours that a configuration is of. Raises `ValueError` if it is none."""
    architecture = (config.architectures or ["DiffLlamaForCausalLM"])[0]
    if architecture not in TASKS:
        raise ValueError(f"`architectures` in config.json must be one of {', '.join(TASKS)}, got {architecture!r}.")
    return architecture


def check_weights(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding]:
    """Checks the headers of the weights against the configuration, and the index against them."""
    index = folder / "model.safetensors.index.json"
    name = index.name if index.is_file() else "model.safetensors"
    try:
        checkpoint = open_checkpoint(folder)
        files = {tensor: file for tensor, (file, _) in checkpoint.homes.items()}
        homes = {tensor: file.path.name for tensor, file in files.items() if isinstance(file, SafetensorsFile)}
        check_tensors(checkpoint.tensors, expected_tensors(config), str(folder))
        if index.is_file():
            content = json.loads(index.read_bytes())
            if content["weight_map"] != homes:
                differing = sorted(dict(content["weight_map"].items() ^ homes.items()))
                yield Finding(name, f"does not say where these tensors are: {', '.join(differing)}")
            size = content.get("metadata", {}).get("total_size")
            if size != (total := sum(tensor.nbytes for tensor in checkpoint.tensors.values())):
                yield Finding(name, f"`total_size` must be {total}, got {size}")
    except (CheckpointError, OSError) as error:
        yield from (Finding(name, line.strip()) for line in str(error).splitlines())
        return
    for path in folder.glob("*.safetensors"):
        if path.name not in homes.values():
            yield Finding(path.name, "is not among the model's weights", wrong=False)
    if not config.dtype or {tensor.dtype for tensor in checkpoint.tensors.values()} != {config.dtype}:
        found = sorted({str(tensor.dtype) for tensor in checkpoint.tensors.values()})
        yield Finding(name, f"has {', '.join(found)}, and `dtype` in config.json is {config.dtype}", wrong=False)


def check_tokenizer(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding]:
    """Checks that the tokenizer, if there is one, loads without code of its own and fits the vocabulary."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield Finding(
            "tokenizer.json", "is not there: save the tokenizer into the folder, if there is one", wrong=False
        )
        return
    name = "tokenizer_config.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of transformers and tokenizers, for whatever it is that is wrong
        yield Finding(name, " ".join(f"{type(error).__name__}: {error}".split()))
        return
    if len(tokenizer) > config.vocab_size:
        yield Finding(name, f"the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}")
    if "auto_map" in tokenizer.init_kwargs:
        yield Finding(name, "`auto_map` names code of its own, which runs where the model's code is trusted")


def check_generation(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding]:
    """Checks the settings for generation."""
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            settings = GenerationConfig.from_pretrained(folder)
        except Exception as error:  # of transformers, for whatever it is that is wrong
            yield Finding(file.name, " ".join(f"{type(error).__name__}: {error}".split()))
            return
        try:
            settings.validate(strict=True)
        except ValueError as error:  # published models have them too
            yield Finding(file.name, " ".join(str(error).split()), wrong=False)
    elif TASKS[architecture_of(config)].pipeline_tag == "text-generation":
        yield Finding(file.name, "is not there", wrong=False)


def check_card(folder: Path) -> Iterator[Finding]:
    """Checks that there is a card with metadata, and a licence."""
    card = folder / "README.md"
    if not any(folder.glob("LICENSE*")):
        yield Finding("LICENSE", "is not there", wrong=False)
    if not card.is_file():
        yield Finding(card.name, "is not there: `diffllama card` writes it", wrong=False)
        return
    try:
        metadata = ModelCard(card.read_text(encoding="utf-8")).data
    except (ValueError, YAMLError) as error:
        yield Finding(card.name, " ".join(f"the metadata cannot be read: {error}".split()))
        return
    if not metadata.get("license"):
        yield Finding(card.name, "names no licence: `diffllama card --license` does", wrong=False)
