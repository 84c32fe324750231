# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that transformers loads: their configuration, tensors, tokenizer and other files."""

import copy
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available, is_gguf_available

from diffllama.checkpoints.errors import CheckpointError, VerificationError, lines
from diffllama.checkpoints.files import AUXILIARY_FILES, NAMES, TOKENIZER_FILES, leads_out
from diffllama.checkpoints.gguf_files import complete_gguf_config, gguf_number, gguf_text
from diffllama.checkpoints.json_files import read_json, write_json
from diffllama.checkpoints.reading import Checkpoint, open_checkpoint
from diffllama.checkpoints.versions import is_code_licence
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP, DiffLlamaConfig


if TYPE_CHECKING:
    from gguf import GGUFReader


AUTO_CLASSES = {reference.partition(".")[2]: auto_class for auto_class, reference in AUTO_MAP.items()}
"""Model class -> the Auto class that loads it."""

LIMITS = {"num_hidden_layers": 10_000, "num_labels": 1_000_000} | dict.fromkeys(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        "max_position_embeddings",
    ),
    1 << 30,
)
"""Largest allowed sizes. No model has larger ones, and transformers would create lists of this length."""

SAMPLE_TEXT = "  Differential attention cancels noise, 4173 times: naïve façade, 北京 🙂\n\tdef f(x): return x  # ok"


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of a configuration on the meta device: for our configuration, the class in `architectures`."""
    model_class = AutoModelForCausalLM
    if config.model_type == DiffLlamaConfig.model_type and config.architectures:
        auto_class = AUTO_CLASSES.get(config.architectures[0], "AutoModelForCausalLM")
        model_class = getattr(transformers, auto_class)
    with torch.device("meta"):  # an attention function of the configuration might be downloaded
        return model_class.from_config(copy.deepcopy(config), attn_implementation="eager")


def expected_tensors(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with this configuration, on the meta device: name -> shape and dtype."""
    tensors = meta_model(config).state_dict()
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # the same tensor as the embedding
    return tensors


def copy_auxiliary_files(src: Path, folder: Path) -> None:
    """Copy the `AUXILIARY_FILES` of a folder, except for the licence of our code.

    Raises:
        ValueError: a file is a link that leads out of the folder, or a .json file contains no JSON object.
    """
    for pattern in AUXILIARY_FILES:
        for file in src.glob(pattern):
            if leads_out(file, src):
                raise ValueError(f"{file} is a link out of its folder, to {os.path.realpath(file)}. Put a file there.")
            if file.is_file() and not is_code_licence(file):
                if file.suffix == ".json":
                    read_json(file)
                (folder / file.relative_to(src).parent).mkdir(exist_ok=True)
                shutil.copyfile(file, folder / file.relative_to(src))


def resolve_tied_lm_head(checkpoint: Checkpoint, *configs: PreTrainedConfig) -> None:
    """Drop an output layer that equals the tied embedding; untie the embedding if it differs."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not configs[0].tie_word_embeddings or not {head, embedding} <= checkpoint.tensors.keys():
        return
    if torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
        checkpoint.drop(head)
    else:
        for config in configs:
            config.tie_word_embeddings = False


def common_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of most tensors."""
    return Counter(tensor.dtype for tensor in checkpoint.tensors.values()).most_common(1)[0][0]


def has_chat_template(folder: Path) -> bool:
    """Whether a folder's tokenizer has a chat template."""
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    settings = folder / "tokenizer_config.json"
    return any((folder / name).exists() for name in files) or bool(
        settings.is_file() and read_json(settings).get("chat_template")
    )


def check_sizes(fields: Mapping[str, Any], file: Path) -> None:
    """Raise `ValueError` for a size that is not an integer, or is larger than any model's."""
    for field, limit in LIMITS.items():
        value = fields.get(field)
        if value is not None and not (type(value) is int and 0 < value <= limit):
            raise ValueError(f"`{field}` in {file} must be a whole number from 1 to {limit:,}, got {repr(value)[:40]}.")


def check_layers(layers: int, tensors: int) -> None:
    """Raise `CheckpointError` if there are more layers than tensors, before so large a model is built."""
    if layers > tensors:
        raise CheckpointError(f"`num_hidden_layers` is {layers:,}, but the number of tensors is only {tensors:,}.")


class TransformersSource:
    """Checkpoint of a transformers model: a folder or a GGUF file.

    Args:
        src: the folder or file.
        model_types: accepted model types.

    Raises:
        FileNotFoundError: `src` does not exist, or the folder has no config.json.
        ValueError: `src` is another kind of file, or the folder has an adapter.
        ImportError: `src` is a GGUF file and the extra `gguf` is not installed.
    """

    def __init__(self, src: Path, model_types: Sequence[str]) -> None:
        if not src.exists():
            raise FileNotFoundError(f"{src} does not exist. Name a folder with config.json and weights or a GGUF file.")
        folder = src if src.is_dir() else src.parent
        if os.path.lexists(folder / "adapter_config.json"):  # peft would load its base model and run its code
            what = "an adapter beside its model" if (folder / "config.json").is_file() else "an adapter and no model"
            raise ValueError(
                f"{folder} has {what} (adapter_config.json). Load it with peft, call merge_and_unload() and save what "
                "that returns."
            )
        if src.is_dir() and not (src / "config.json").is_file():
            raise FileNotFoundError(f"{src} has no config.json. Name a folder that `save_pretrained` wrote.")
        if not src.is_dir() and not (src.is_file() and src.suffix.lower() == ".gguf"):
            raise ValueError(f"{src} is neither a folder nor a .gguf file. Name one with config.json and weights.")
        if src.is_file() and not (is_gguf_available() and is_accelerate_available()):
            raise ImportError(
                "Reading a GGUF file needs gguf and accelerate. In a clone of diffllama: pip install '.[gguf]'"
            )
        self.src, self.model_types = src, model_types
        # `trust_remote_code=False`: code in the folder never runs
        self.location: dict[str, Any] = {"pretrained_model_name_or_path": folder, "trust_remote_code": False}
        if src.is_file():
            self.location["gguf_file"] = src.name

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The source's configuration.

        Raises:
            ValueError: config.json is not valid JSON, has absurd sizes or names other weights; or the model has another
                type or is quantized.
            CheckpointError: a GGUF file has parts that transformers does not read.
        """
        if self.src.is_dir():
            file = self.src / "config.json"
            fields = read_json(file)
        else:
            file = self.src
            fields = {"num_hidden_layers": gguf_number(self.gguf_reader, "block_count")}
        check_sizes(fields, file)
        if "transformers_weights" in fields:
            raise ValueError(
                f"`transformers_weights` in {file} makes transformers load other weights than those of the folder, got "
                f"{fields['transformers_weights']!r}. Remove the field, and rename the right weights to {NAMES[0]}."
            )
        try:
            config = AutoConfig.from_pretrained(**self.location)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{file} is not a valid configuration: {type(error).__name__}: {error}") from error
        config._attn_implementation = "eager"  # the source's might be downloaded, and is not the result's
        if config.model_type not in self.model_types:
            known = ", ".join(map(repr, self.model_types))
            raise ValueError(f"`model_type` of the source must be one of {known}, got {config.model_type!r}.")
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("The source is quantized (`quantization_config`): convert the original weights instead.")
        if self.src.is_file():
            check_layers(config.num_hidden_layers, len(self.gguf_reader.tensors))
            complete_gguf_config(config, self.gguf_reader, self.src, meta_model(config).state_dict())
        return config

    @cached_property
    def gguf_reader(self) -> "GGUFReader":
        """Metadata and tensors of a GGUF file. Raises `ValueError` for a damaged file."""
        from gguf import GGUFReader

        try:
            return GGUFReader(self.src)
        except Exception as error:  # gguf raises many classes for damaged files
            raise ValueError(f"{self.src} is not a complete GGUF file: {error}. Download it again.") from error

    @cached_property
    def gguf_model(self) -> PreTrainedModel:
        """The model that transformers reads from a GGUF file, with weights expanded to float32."""
        model, report = AutoModelForCausalLM.from_pretrained(
            **self.location, config=self.config, output_loading_info=True
        )
        if faults := [f"{kind}: {name}" for kind, names in report.items() for name in sorted(map(str, names))]:
            raise CheckpointError(lines(f"{self.src} and its configuration do not match", faults))
        return model.eval()

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The source's tensors. Those of a folder are read one by one; those of a GGUF file are all in memory."""
        if self.src.is_dir():
            return open_checkpoint(self.src)
        tensors = self.gguf_model.state_dict()
        if self.gguf_model.lm_head.weight is self.gguf_model.model.embed_tokens.weight:
            del tensors["lm_head.weight"]
        return Checkpoint.in_memory(tensors, self.src)

    def expected(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the source must have. Raises `CheckpointError` if it has too few for its layers."""
        check_layers(self.config.num_hidden_layers, len(self.checkpoint.tensors))
        return expected_tensors(self.config)

    @cached_property
    def tokenizer(self) -> Any:
        """The source's tokenizer, or `None`. Raises `ValueError` if it does not load."""
        if self.src.is_file():
            has_one = gguf_text(self.gguf_reader, "tokenizer.ggml.model") not in (None, "none")
        else:
            has_one = any((self.src / name).is_file() for name in TOKENIZER_FILES)
        try:
            return AutoTokenizer.from_pretrained(**self.location) if has_one else None
        except Exception as error:  # transformers and tokenizers raise many classes for damaged files
            raise ValueError(
                f"The tokenizer in {self.src} does not load without running its own code: {error}"
            ) from error

    def save_auxiliary_files(self, folder: Path) -> None:
        """Save tokenizer, chat template and generation settings into a folder. Files are copied unchanged."""
        if self.src.is_file():
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            self.gguf_model.generation_config.save_pretrained(folder)
        else:
            copy_auxiliary_files(self.src, folder)

    def pin_tokenizer_class(self, folder: Path) -> None:
        """Make the tokenizer in a folder load as the source's does.

        transformers also chooses the tokenizer's class by the model type, which has changed. If it would choose another
        one, the source's class is written into tokenizer_config.json. A tokenizer's own code and its entry in
        `auto_map` are left out, because they would be trusted together with the model's code.

        Raises:
            VerificationError: the tokenizer does not load, or encodes text differently.
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
            if not loads_like(self.tokenizer, folder, exactly=False):
                raise VerificationError(f"The tokenizer of {self.src} encodes text differently in the result.")


def loads_like(tokenizer: Any, folder: Path, exactly: bool = True) -> bool:
    """Whether the tokenizer in a folder encodes like another one, or, with `exactly`, has the same definition."""
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # transformers and tokenizers raise many classes for damaged files
        return False
    first, second = (getattr(each, "backend_tokenizer", None) for each in (tokenizer, loaded))
    if exactly and first is not None and second is not None and first.to_str() != second.to_str():
        return False
    texts = (SAMPLE_TEXT, " ".join(tokenizer.all_special_tokens) + SAMPLE_TEXT)
    return all(tokenizer(text).input_ids == loaded(text).input_ids for text in texts)
