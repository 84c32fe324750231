# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that transformers loads, as sources and as results of a conversion: stock models and our own."""

import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available, is_gguf_available

from diffllama.conversion.checkpoints import NAMES, Checkpoint, TensorsInMemory, open_checkpoint
from diffllama.conversion.verification import Outputs, VerificationError, model_outputs
from diffllama.conversion.weight_map import CheckpointError, lines
from diffllama.hub_cards.code import AUTO_CLASSES, current_name, is_code_licence, write_code
from diffllama.hub_cards.texts import read_json, write_json
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
LIMITS = {"num_hidden_layers": 10_000, "num_labels": 1_000_000} | dict.fromkeys(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        "max_position_embeddings",
    ),
    1 << 30,
)
"""The largest sizes of a configuration: no model has larger ones, and transformers would make lists of their length."""

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
    folder, target = (Path(os.path.realpath(path)) for path in (folder, file))  # `resolve` fails at a loop of links
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    return not (target.is_relative_to(folder) or target.is_relative_to(blobs))


def copy_companions(src: Path, folder: Path) -> None:
    """Copies the files of a folder `src` that `COMPANIONS` names, but for the licence of our code.

    Raises:
        ValueError: one of them is a link out of the folder, or is called .json and is no JSON object.
    """
    for pattern in COMPANIONS:
        for file in src.glob(pattern):
            if leads_out(file, src):
                raise ValueError(f"{file} is a link out of its folder, to {os.path.realpath(file)}. Put a file there.")
            if file.is_file() and not is_code_licence(file):
                if file.suffix == ".json":
                    read_json(file)
                (folder / file.relative_to(src).parent).mkdir(exist_ok=True)
                shutil.copyfile(file, folder / file.relative_to(src))


def has_chat_template(folder: Path) -> bool:
    """Whether a folder's tokenizer knows how to write a chat."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    settings = folder / "tokenizer_config.json"
    return any((folder / name).exists() for name in files) or bool(
        settings.is_file() and read_json(settings).get("chat_template")
    )


def load(location: dict[str, Any], dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    """Loads a model to be compared with another one. Raises `CheckpointError` if transformers misses tensors."""
    config = AutoConfig.from_pretrained(**location)
    config._attn_implementation = implementation  # an argument would not replace what config.json says
    model, report = AutoModelForCausalLM.from_pretrained(
        **location, config=config, dtype=dtype, output_loading_info=True
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


def gguf_number(reader: "GGUFReader", key: str) -> int | None:
    """A whole number of the model in the metadata of a GGUF file."""
    field = reader.fields.get(f"{gguf_text(reader, 'general.architecture')}.{key}")
    return int(field.parts[field.data[0]][0]) if field else None


def complete_gguf_config(config: PreTrainedConfig, reader: "GGUFReader", src: Path) -> None:
    """Adds to the configuration that transformers reads from a GGUF file what it leaves out.

    Raises:
        CheckpointError: it would leave out more, which cannot be added. All of it is listed.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    check_layers(config.num_hidden_layers, len(reader.tensors))
    arch = gguf_text(reader, "general.architecture")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (key_width := gguf_number(reader, "attention.key_length") or width) != width:
        config.head_dim = width = key_width

    faults = []
    if window := gguf_number(reader, "attention.sliding_window"):  # 0: none
        if config.model_type == "phi3":
            config.sliding_window = window
        else:
            faults.append(f"{arch}.attention.sliding_window {window}")
    if (scaling := gguf_text(reader, f"{arch}.rope.scaling.type")) not in (None, "none"):
        faults.append(f"{arch}.rope.scaling.type {scaling!r}")
    if (rotated := gguf_number(reader, "rope.dimension_count") or width) != width:
        faults.append(f"{arch}.rope.dimension_count {rotated} of {width}")
    archs = {name: member for member, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(archs[arch], config.num_hidden_layers)
    known = {names.get_name(name, (".weight", ".bias")) for name in meta_model(config).state_dict()}
    faults += [f"tensor {tensor.name}" for tensor in reader.tensors if tensor.name not in known]
    if faults:
        what = f"transformers does not read these parts of {src}; convert the original weights instead"
        raise CheckpointError(lines(what, faults))


def check_sizes(fields: Mapping[str, Any], file: Path) -> None:
    """Raises `ValueError` for a size that is no whole number, or larger than any model's."""
    for field, limit in LIMITS.items():
        value = fields.get(field)
        if value is not None and not (type(value) is int and 0 < value <= limit):
            raise ValueError(f"`{field}` in {file} must be a whole number from 1 to {limit:,}, got {repr(value)[:40]}.")


def check_layers(layers: int, tensors: int) -> None:
    """Raises `CheckpointError` if there are more layers than tensors, before a model of that many layers is made."""
    if layers > tensors:
        raise CheckpointError(f"`num_hidden_layers` is {layers:,}, and the number of tensors only {tensors:,}.")


def refuse_adapter(folder: Path) -> None:
    """Raises `ValueError` for a folder with an adapter, for which peft would load its base model and run its code."""
    if os.path.lexists(folder / "adapter_config.json"):
        what = "an adapter beside its model" if (folder / "config.json").is_file() else "an adapter and no model"
        raise ValueError(
            f"{folder} has {what} (adapter_config.json). Load it with peft, call merge_and_unload() and save what that "
            "returns."
        )


class TransformersSource:
    """A folder with a checkpoint of a model of transformers, or a GGUF file of one.

    Args:
        src: the folder or file.
        model_types: the model types that are accepted.

    Raises:
        FileNotFoundError: there is no such folder or file, or no config.json in the folder.
        ValueError: `src` is another kind of file, or there is an adapter in the folder.
        ImportError: it is a GGUF file and the packages of the extra `gguf` are not installed.
    """

    def __init__(self, src: Path, model_types: Sequence[str]) -> None:
        if not src.exists():
            raise FileNotFoundError(f"{src} does not exist. Name a folder with config.json and weights or a GGUF file.")
        refuse_adapter(src if src.is_dir() else src.parent)
        if src.is_dir() and not (src / "config.json").is_file():
            raise FileNotFoundError(f"{src} has no config.json, so it is not a Transformers checkpoint.")
        if not src.is_dir() and not (src.is_file() and src.suffix.lower() == ".gguf"):
            raise ValueError(f"{src} is neither a folder nor a .gguf file.")
        if src.is_file() and not (is_gguf_available() and is_accelerate_available()):
            raise ImportError(
                "Reading a GGUF file needs gguf and accelerate. In a clone of diffllama: pip install '.[gguf]'"
            )
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
            ValueError: config.json is no JSON, has absurd sizes or names other weights; or the model is of another type
                or quantized.
            CheckpointError: it is a GGUF file with something in it that transformers does not read.
        """
        file = self.src / "config.json" if self.src.is_dir() else self.src
        if self.src.is_dir():
            fields = read_json(file)
            if "transformers_weights" in fields:
                raise ValueError(
                    f"`transformers_weights` in {file} makes transformers load other weights than the folder's, got "
                    f"{fields['transformers_weights']!r}. Remove it, and call the file of the right weights {NAMES[0]}."
                )
            check_sizes(fields, file)
        else:
            check_sizes({"num_hidden_layers": gguf_number(self.gguf_reader, "block_count")}, file)
        try:
            config = AutoConfig.from_pretrained(**self.location)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{file} is no configuration: {type(error).__name__}: {error}") from error
        config._attn_implementation = "eager"  # its own might have to be fetched, and is not the result's
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
        """Names and shapes that the tensors must have. Raises `CheckpointError` if there are too few for the layers."""
        check_layers(self.config.num_hidden_layers, len(self.checkpoint.tensors))
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
        """The source's tokenizer, or `None`. Raises `ValueError` if it does not load."""
        if self.src.is_file():
            has_one = gguf_text(self.gguf_reader, "tokenizer.ggml.model") not in (None, "none")
        else:
            has_one = any((self.src / name).is_file() for name in TOKENIZER_FILES)
        try:
            return AutoTokenizer.from_pretrained(**self.location) if has_one else None
        except Exception as error:  # of transformers and tokenizers, for whatever it is that is wrong with the files
            raise ValueError(
                f"The tokenizer in {self.src} does not load, or not without code of its own: {error}"
            ) from error

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
        settings = read_json(file) if file.is_file() else {}
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
