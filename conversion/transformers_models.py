# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that transformers loads, as sources and as results of a conversion: stock models and our own."""

import copy
import json
import os
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available, is_gguf_available

from diffllama.conversion.checkpoints import Checkpoint, TensorsInMemory, open_checkpoint
from diffllama.conversion.verification import Outputs, VerificationError, model_outputs
from diffllama.conversion.weight_map import CheckpointError, lines
from diffllama.hub_cards.code import AUTO_CLASSES, current_name, is_code_licence, write_code
from diffllama.hub_cards.texts import write_json
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


if TYPE_CHECKING:
    from gguf import GGUFReader


COMPANIONS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "*.tiktoken",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
)
"""Files beside the weights that belong to a tokenizer, a chat template, generation or the model's licence; they are
copied as they are."""

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
SAMPLE_TEXT = "  Differential attention cancels noise, 4173 times: naïve façade, 北京 🙂\n\tdef f(x): return x  # ok"


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration, without values: a language model, or, of ours, what `architectures` names."""
    model_class = AutoModelForCausalLM
    if config.model_type == DiffLlamaConfig.model_type and config.architectures:
        auto_class = AUTO_CLASSES.get(current_name(config.architectures[0]), "AutoModelForCausalLM")
        model_class = getattr(transformers, auto_class)
    with torch.device("meta"):  # whatever attention the configuration asks for might have to be fetched
        return model_class.from_config(copy.deepcopy(config), attn_implementation="eager")


def expected_tensors(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Names and shapes of the tensors that a checkpoint with this configuration has, on the meta device."""
    tensors = meta_model(config).state_dict()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # the same tensor as the embedding
    return tensors


def leads_out(file: Path, folder: Path) -> bool:
    """Whether a file of a folder is a link to outside of it. In the Hub's cache, files are links to its blobs."""
    folder, target = folder.resolve(), file.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    return not (target.is_relative_to(folder) or target.is_relative_to(blobs))


def copy_companions(src: Path, folder: Path) -> None:
    """Copies the files of a folder `src` that `COMPANIONS` names, but for the licence of our code.

    Raises:
        ValueError: one of them is a link out of the folder.
    """
    for pattern in COMPANIONS:
        for file in src.glob(pattern):
            if leads_out(file, src):
                raise ValueError(f"{file} is a link out of its folder, to {os.path.realpath(file)}. Put a file there.")
            if file.is_file() and not is_code_licence(file):
                (folder / file.relative_to(src).parent).mkdir(exist_ok=True)
                shutil.copyfile(file, folder / file.relative_to(src))


def has_chat_template(folder: Path) -> bool:
    """Whether a folder's tokenizer knows how to write a chat."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    settings = folder / "tokenizer_config.json"
    return any((folder / name).exists() for name in files) or bool(
        settings.is_file() and json.loads(settings.read_bytes()).get("chat_template")
    )


def load(location: dict[str, Any], dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    """Loads a model to be compared with another one. Raises `CheckpointError` if transformers misses tensors."""
    model, report = AutoModelForCausalLM.from_pretrained(
        **location, dtype=dtype, attn_implementation=implementation, output_loading_info=True
    )
    if report["missing_keys"]:
        raise CheckpointError(
            lines("Without --no-verify, transformers has to load the model, and it does not find these tensors",
                  sorted(report["missing_keys"]))
        )  # fmt: skip
    return model.eval()


def cast(model: PreTrainedModel, *dtypes: torch.dtype | None) -> PreTrainedModel:
    """Casts a model's parameters, and nothing else (rotary frequencies stay in float32), to one dtype after another.

    They are made contiguous too, for with other strides torch may choose other kernels.
    """
    for parameter in model.parameters():
        for dtype in dtypes:
            parameter.data = parameter.data if dtype is None else parameter.data.to(dtype)
        parameter.data = parameter.data.contiguous()
    return model


def gguf_text(reader: "GGUFReader", key: str) -> str | None:
    """A text in the metadata of a GGUF file."""
    field = reader.fields.get(key)
    return bytes(field.parts[field.data[0]]).decode() if field else None


def complete_gguf_config(config: PreTrainedConfig, reader: "GGUFReader", src: Path) -> None:
    """Adds to the configuration that transformers reads from a GGUF file what it leaves out.

    Raises:
        CheckpointError: it would leave out more, which cannot be added. All of it is listed.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = gguf_text(reader, "general.architecture")

    def number(key: str) -> int | None:
        field = reader.fields.get(f"{arch}.{key}")
        return int(field.parts[field.data[0]][0]) if field else None

    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (key_width := number("attention.key_length") or width) != width:
        config.head_dim = width = key_width

    faults = []
    if window := number("attention.sliding_window"):  # 0: none
        if config.model_type == "phi3":
            config.sliding_window = window
        else:
            faults.append(f"{arch}.attention.sliding_window {window}")
    if (scaling := gguf_text(reader, f"{arch}.rope.scaling.type")) not in (None, "none"):
        faults.append(f"{arch}.rope.scaling.type {scaling!r}")
    if (rotated := number("rope.dimension_count") or width) != width:
        faults.append(f"{arch}.rope.dimension_count {rotated} of {width}")
    archs = {name: member for member, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(archs[arch], config.num_hidden_layers)
    known = {names.get_name(name, (".weight", ".bias")) for name in meta_model(config).state_dict()}
    faults += [f"tensor {tensor.name}" for tensor in reader.tensors if tensor.name not in known]
    if faults:
        what = f"transformers does not read these parts of {src}; convert the original weights instead"
        raise CheckpointError(lines(what, faults))


class TransformersSource:
    """A folder with a checkpoint of a model of transformers, or a GGUF file of one.

    Args:
        src: the folder or file.
        model_types: the model types that are accepted.

    Raises:
        FileNotFoundError: there is no such folder or file, or no config.json in the folder.
        ValueError: `src` is another kind of file.
        ImportError: it is a GGUF file and the packages of the extra `gguf` are not installed.
    """

    def __init__(self, src: Path, model_types: Sequence[str]) -> None:
        if not src.exists():
            raise FileNotFoundError(f"{src} does not exist. Name a folder with config.json and weights or a GGUF file.")
        if src.is_dir() and not (src / "config.json").is_file():
            raise FileNotFoundError(f"{src} has no config.json, so it is not a Transformers checkpoint.")
        if src.is_file() and src.suffix.lower() != ".gguf":
            raise ValueError(f"{src} is neither a folder nor a .gguf file.")
        if src.is_file() and not (is_gguf_available() and is_accelerate_available()):
            raise ImportError("Reading a GGUF file needs gguf and accelerate: pip install 'diffllama[gguf]'.")
        self.src = src
        self.model_types = model_types
        # `trust_remote_code=False`: code that lies in the folder is never run
        location = {"pretrained_model_name_or_path": src, "trust_remote_code": False}
        file = {"pretrained_model_name_or_path": src.parent, "gguf_file": src.name}
        self.location = location if src.is_dir() else location | file

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The source's configuration.

        Raises:
            ValueError: it is of another model type, or of a quantized model.
            CheckpointError: it is a GGUF file with something in it that transformers does not read.
        """
        config = AutoConfig.from_pretrained(**self.location)
        if config.model_type not in self.model_types:
            known = ", ".join(map(repr, self.model_types))
            raise ValueError(f"`model_type` of the source must be one of {known}, got {config.model_type!r}.")
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("The source is quantized (`quantization_config`): convert the original weights instead.")
        if self.src.is_file():
            complete_gguf_config(config, self.gguf_reader, self.src)
        return config

    @cached_property
    def gguf_reader(self) -> "GGUFReader":
        """Metadata and tensors of a GGUF file."""
        from gguf import GGUFReader

        return GGUFReader(self.src)

    @cached_property
    def gguf_model(self) -> PreTrainedModel:
        """The model that transformers makes of a GGUF file, its weights expanded to float32."""
        model, report = AutoModelForCausalLM.from_pretrained(
            **self.location, config=self.config, output_loading_info=True
        )
        if faults := [f"{kind}: {name}" for kind, names in report.items() for name in sorted(map(str, names))]:
            raise CheckpointError(lines(f"{self.src} and its configuration do not match", faults))
        return model.eval()

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The source's tensors; those of a folder are read one by one, a GGUF file's are all in memory."""
        if self.src.is_dir():
            return open_checkpoint(self.src)
        tensors = self.gguf_model.state_dict()
        if self.gguf_model.lm_head.weight is self.gguf_model.model.embed_tokens.weight:
            del tensors["lm_head.weight"]
        return Checkpoint.of_file(TensorsInMemory(tensors, self.src))

    def expected(self) -> dict[str, torch.Tensor]:
        """Names and shapes that the tensors must have."""
        return expected_tensors(self.config)

    def outputs(self, dtype: torch.dtype, implementation: str, rounded: torch.dtype | None = None) -> Outputs:
        """What the model computes in a dtype with an implementation of attention, see `verification`.

        With `rounded`, its weights are rounded to that dtype first.
        """
        if self.src.is_dir():
            return model_outputs(cast(load(self.location, rounded or dtype, implementation), dtype))
        self.gguf_model.set_attn_implementation(implementation)
        return model_outputs(cast(self.gguf_model, rounded, dtype))

    @cached_property
    def tokenizer(self) -> Any:
        """The source's tokenizer, or `None`. Raises whatever transformers raises on files that are broken."""
        if self.src.is_file():
            has_one = gguf_text(self.gguf_reader, "tokenizer.ggml.model") not in (None, "none")
        else:
            has_one = any((self.src / name).is_file() for name in TOKENIZER_FILES)
        return AutoTokenizer.from_pretrained(**self.location) if has_one else None

    def save_companions(self, folder: Path) -> None:
        """Puts tokenizer, chat template and settings for generation into a folder: untouched, if they are files."""
        if self.src.is_file():
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            self.gguf_model.generation_config.save_pretrained(folder)
        else:
            copy_companions(self.src, folder)

    def settle_tokenizer(self, folder: Path) -> None:
        """Makes the tokenizer in a folder load as the source's does.

        transformers chooses a tokenizer's class by the model type too, which is another one now: where that makes a
        difference, the class that the source had is written down. Code of a tokenizer does not come along, nor does its
        entry in `auto_map`: with the model's code, it would be trusted.

        Raises:
            VerificationError: it still encodes otherwise, or does not load.
        """
        if self.tokenizer is None:
            return
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_bytes()) if file.is_file() else {}
        if settings.pop("auto_map", None) is not None:
            write_json(file, settings)
        if not loads_like(self.tokenizer, folder):
            settings["tokenizer_class"] = type(self.tokenizer).__name__
            write_json(file, settings)
            if not loads_like(self.tokenizer, folder, to_the_letter=False):
                raise VerificationError(f"The tokenizer of {self.src} encodes otherwise in the converted folder.")


def loads_like(tokenizer: Any, folder: Path, to_the_letter: bool = True) -> bool:
    """Whether the tokenizer in a folder loads and is (or at least encodes like) another one."""
    try:
        loaded = AutoTokenizer.from_pretrained(**result_location(folder))
    except Exception:  # of transformers and tokenizers, for whatever it is that is wrong with the files
        return False
    mine, theirs = (getattr(each, "backend_tokenizer", None) for each in (tokenizer, loaded))
    if to_the_letter and mine is not None and theirs is not None and mine.to_str() != theirs.to_str():
        return False
    texts = (SAMPLE_TEXT, " ".join(tokenizer.all_special_tokens) + SAMPLE_TEXT)
    return all(tokenizer(text).input_ids == loaded(text).input_ids for text in texts)


def result_location(folder: Path) -> dict[str, Any]:
    """The arguments with which transformers loads a converted folder, with the classes that are installed."""
    return {"pretrained_model_name_or_path": folder, "trust_remote_code": False}


class TransformersResult:
    """A folder that transformers loads: a model of ours, with its code, or a stock model."""

    stem = "model"
    """What files of weights are called."""

    def save_config(self, config: PreTrainedConfig, folder: Path) -> None:
        """Writes the configuration and, of a model of ours, its code."""
        model = meta_model(config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if config.model_type == DiffLlamaConfig.model_type:
            write_code(folder)

    def outputs(self, config: PreTrainedConfig, folder: Path, dtype: torch.dtype, implementation: str) -> Outputs:
        """What the model in a folder computes in a dtype with an implementation of attention."""
        return model_outputs(load(result_location(folder), dtype, implementation))
