# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a folder is fit for the Hub. Nothing in it is run."""

import os
import pickletools
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from diffllama.conversion.checkpoints import NAMES, PICKLES, SafetensorsFile, open_checkpoint, open_file
from diffllama.conversion.transformers_models import TOKENIZER_FILES, expected_tensors, leads_out
from diffllama.conversion.weight_map import CheckpointError, check_tensors
from diffllama.errors import DiffLlamaError
from diffllama.hub_cards.cards import CARD, TASKS, card_metadata, read_card
from diffllama.hub_cards.code import EARLIER_AUTO_MAP, HubCodeError, current_name, differences, hub_code
from diffllama.hub_cards.texts import SECRET_NAMES, has_place, load_json, read_json, secrets, strings
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


RUN_SUFFIXES = (
    *(*PICKLES, ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".h5", ".keras"),
    *(".pyc", ".so", ".dll", ".dylib", ".exe"),
)
"""Files that are read by running what they say, or may be."""

ARCHIVES = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z"}
"""How compressed files begin; what is in them is not looked into."""

HIDDEN_CODE = ("custom_pipelines", "_attn_implementation", "attn_implementation", "_experts_implementation")
"""Fields of config.json for which transformers fetches or runs more code than `auto_map` names."""

NAMES_OF_ANYTHING = ("chat_template", "id2label", "label2id")
"""JSON fields that may hold what looks like a path."""


class FolderError(DiffLlamaError):
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


def check(folder: str | os.PathLike[str]) -> list[Finding]:
    """What is wrong with a folder that is to be published, and what is good to know about it.

    Every file loads, by what is installed here and never by the folder's own code; the code is the package's, or how
    it differs; the weights are those that the configuration asks for; there are no pickles, secrets, or paths of a
    machine.

    Args:
        folder: the folder, with a model of ours.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder. Name a folder with a model.")
    findings = [*check_files(folder, sent_files(folder)), *check_code(folder, known_auto_map(folder))]
    config = load_config(folder)
    if isinstance(config, Finding):
        return [*findings, config]
    findings += check_config(folder)
    for name, look in (
        (NAMES[0], check_weights),
        ("tokenizer_config.json", check_tokenizer),
        ("generation_config.json", check_generation),
        (CARD, check_card),
    ):
        try:
            findings += look(folder, config)
        except Exception as error:  # a hostile file can fail anywhere; it is the folder that is wrong
            findings.append(Finding(name, f"cannot be read: {one_line(error)}"))
    return findings


def one_line(error: Exception) -> str:
    """An error of a library, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def sent_files(folder: Path) -> list[Path]:
    """The files of a folder that are published: all that are not hidden."""
    files = (file for file in folder.rglob("*") if file.is_file() or file.is_symlink())
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def check_files(folder: Path, files: Iterable[Path]) -> Iterator[Finding]:
    """Checks files by themselves: that they can be read, hold no pickle, no secret and no path of a machine."""
    for file in files:
        name = file.relative_to(folder).as_posix()
        suffix = file.suffix.lower()
        if leads_out(file, folder):
            yield Finding(name, f"is a link out of the folder, to {os.path.realpath(file)}")
        elif not file.is_file():
            yield Finding(name, f"is a link to {'a folder' if file.is_dir() else 'nothing'}")
        elif suffix == ".safetensors":
            try:
                opened = open_file(file)
            except (SafetensorError, ValueError, OSError) as error:
                yield Finding(name, f"cannot be read: {error}")
            else:
                header = opened.header if isinstance(opened, SafetensorsFile) else b""
                yield from (Finding(name, f"holds {secret}") for secret in secrets(header.decode(errors="replace")))
        elif runs(file):
            yield Finding(name, "is a pickle or a program, which would run when it is loaded")
        else:
            data = file.read_bytes()
            if kind := next((kind for begin, kind in ARCHIVES.items() if data.startswith(begin)), None):
                yield Finding(name, f"is compressed ({kind}), so that nobody looks into it")
            yield from (Finding(name, f"holds {secret}") for secret in secrets(data.decode(errors="replace")))
            if suffix == ".json":
                yield from (Finding(name, message) for message in json_faults(file, data))


def runs(file: Path) -> bool:
    """Whether a file is a pickle or a program, by its name or by what is in it."""
    if file.suffix.lower() in RUN_SUFFIXES:
        return True
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            return any(Path(name).suffix.lower() in RUN_SUFFIXES for name in archive.namelist())
    try:
        with file.open("rb") as opened:
            operations = {operation.name for operation, _, _ in pickletools.genops(opened)}
    except Exception:  # text and other data are no pickle's operations up to its end, in one way or another
        return False
    return not operations.isdisjoint(("PROTO", "GLOBAL", "INST", "REDUCE"))


def json_faults(file: Path, data: bytes) -> Iterator[str]:
    """What is wrong with a JSON file: that it is none, names code, or holds secrets or paths of a machine."""
    try:
        content = load_json(data)
    except ValueError as error:
        yield f"is no JSON: {error}"
        return
    if file.name == "tokenizer.json" and isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in ("model", "added_tokens")}
    elif file.name in ("vocab.json", "added_tokens.json"):
        return  # tokens may look like anything
    if file.name != "config.json" and isinstance(content, dict) and "auto_map" in content:
        yield "`auto_map` names code of its own, which runs where the model's code is trusted"
    for where, value in strings(content):
        if SECRET_NAMES.search(where) and value and not value.startswith("<"):
            yield f"`{where}` holds a secret"
        if has_place(value) and not any(name in where for name in NAMES_OF_ANYTHING):
            yield f"`{where}` holds a path of a machine: {value[:80]!r}"


def check_code(folder: Path, auto_map: Mapping[str, str] = AUTO_MAP) -> Iterator[Finding]:
    """Checks that the Hub's loader can follow the folder's code, and compares it with the package's."""
    try:
        code = hub_code(folder, auto_map)
    except HubCodeError as error:
        yield from (finding(fault) for fault in error.faults)
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
        content = read_json(folder / name)
        if content.get("model_type") != DiffLlamaConfig.model_type:
            return Finding(
                name, f"`model_type` must be {DiffLlamaConfig.model_type!r}, got {content.get('model_type')!r}"
            )
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        architecture_of(config)
    except Exception as error:  # of transformers, for whatever it is that is wrong
        return Finding(name, one_line(error))
    return config


def known_auto_map(folder: Path) -> dict[str, str]:
    """The `auto_map` that a folder must have: ours, but for classes that it calls by their earlier names."""
    try:
        found = read_json(folder / "config.json").get("auto_map")
    except (OSError, ValueError):
        return AUTO_MAP
    found = found if isinstance(found, dict) else {}
    return AUTO_MAP | {name: earlier for name, earlier in EARLIER_AUTO_MAP.items() if found.get(name) == earlier}


def check_config(folder: Path) -> Iterator[Finding]:
    """Checks that a configuration names the code of its folder and no other."""
    name, content = "config.json", read_json(folder / "config.json")
    yield from (Finding(name, f"`{field}` makes transformers run more") for field in HIDDEN_CODE if field in content)
    found = content.get("auto_map")
    found = found if isinstance(found, dict) else {}
    known = known_auto_map(folder)
    for auto_class in known | found:
        wanted, got = known.get(auto_class), found.get(auto_class)
        if wanted != got:
            must = f"must have {auto_class}: {wanted!r}" if wanted else f"must not have {auto_class}"
            yield Finding(name, f"`auto_map` {must}, got {got!r}")
    architecture = (content.get("architectures") or [""])[0]
    if known != AUTO_MAP or architecture != current_name(architecture):
        yield Finding(
            name,
            "`architectures` or `auto_map` has earlier names of our classes. transformers has others of these names, "
            "which some libraries load instead: `diffllama export` writes today's",
            wrong=False,
        )
    if content.get("quantization_config"):
        yield Finding(name, "`quantization_config`: it loads only where that quantization is installed", wrong=False)


def architecture_of(config: PreTrainedConfig) -> str:
    """The name of the class of ours that a configuration is of. Raises `ValueError` if it is none."""
    architecture = current_name((config.architectures or ["DifferentialLlamaForCausalLM"])[0])
    if architecture not in TASKS:
        raise ValueError(f"`architectures` in config.json must be one of {', '.join(TASKS)}, got {architecture!r}.")
    return architecture


def check_weights(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding]:
    """Checks the headers of the weights against the configuration, and the index against them."""
    index = folder / f"{NAMES[0]}.index.json"
    name = index.name if index.is_file() else NAMES[0]
    try:
        checkpoint = open_checkpoint(folder)
        files = {tensor: file for tensor, (file, _) in checkpoint.homes.items()}
        homes = {tensor: file.path.name for tensor, file in files.items() if isinstance(file, SafetensorsFile)}
        check_tensors(checkpoint.tensors, expected_tensors(config), str(folder))
        if index.is_file():
            content = read_json(index)
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
        yield Finding(name, one_line(error))
        return
    if len(tokenizer) > config.vocab_size:
        yield Finding(name, f"the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}")
    if tokenizer.chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        except TemplateSyntaxError as error:
            yield Finding("chat_template.jinja", one_line(error))
        except Exception as error:  # a template may refuse a conversation
            yield Finding("chat_template.jinja", f"refuses a greeting: {one_line(error)}", wrong=False)


def check_generation(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding]:
    """Checks the settings for generation."""
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            settings = GenerationConfig.from_pretrained(folder)
        except Exception as error:  # of transformers, for whatever it is that is wrong
            yield Finding(file.name, one_line(error))
            return
        try:
            settings.validate(strict=True)
        except ValueError as error:  # published models have them too
            yield Finding(file.name, " ".join(str(error).split()), wrong=False)
    elif TASKS[architecture_of(config)].pipeline_tag == "text-generation":
        yield Finding(file.name, "is not there", wrong=False)


def check_card(folder: Path, config: DiffLlamaConfig) -> Iterator[Finding]:
    """Checks that there is a card with metadata, and a licence."""
    if not any(folder.glob("LICENSE*")):
        yield Finding("LICENSE", "is not there", wrong=False)
    if not (folder / CARD).is_file():
        yield Finding(CARD, "is not there: `diffllama card` writes it", wrong=False)
        return
    metadata = card_metadata(read_card(folder / CARD), CARD)
    for where, value in strings(metadata):
        if has_place(value):
            yield Finding(CARD, f"`{where}` holds a path of a machine: {value[:80]!r}")
    if not metadata.get("license"):
        yield Finding(CARD, "names no licence: `diffllama card --license` does", wrong=False)
