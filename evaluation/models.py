# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Load models to measure: any causal language model of transformers, differential or not, with its tokenizer."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from diffllama.checkpoints.files import locate
from diffllama.checkpoints.options import DType


OWN_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
"""Files of a model folder that determine what the model computes and how its tokenizer splits text."""


def digest(path: Path, patterns: tuple[str, ...] = ("**/*",)) -> str:
    """Compute the hexadecimal SHA-256 of a file, or of a folder's matching visible files (names and bytes)."""
    total = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as stream:
            while block := stream.read(1 << 24):
                total.update(block)
        return total.hexdigest()
    for file in sorted({file for pattern in patterns for file in path.glob(pattern)}):
        name = file.relative_to(path)
        if file.is_file() and not any(part.startswith(".") for part in name.parts):
            total.update(f"{name.as_posix()}\0{digest(file)}\n".encode())
    return total.hexdigest()


def available_device(name: str | None) -> torch.device:
    """Return the named device; by default the first GPU, or the CPU.

    Raises:
        ValueError: torch cannot compute on the device.
    """
    try:
        place = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError) as error:  # device `meta` raises NotImplementedError, a RuntimeError
        raise ValueError(f"--device: torch cannot compute on {name!r} here. Name another, such as cpu.") from error
    return place


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A loaded model to measure, in evaluation mode, and its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def prefix(self) -> list[int]:
        """Return the token ids that the tokenizer puts before every text: usually the BOS token, or none.

        Raises:
            ValueError: the tokenizer has no tokens for `a`, or encodes it differently with special tokens.
        """
        whole, text = self.tokenizer("a").input_ids, self.encode("a")
        prefixes = (whole[:at] for at in range(len(whole)) if text and whole[at : at + len(text)] == text)
        prefix = next(prefixes, None)
        if prefix is None:
            raise ValueError(
                f"The tokenizer of {self.name} must encode `a` alike with and without special tokens, got {whole} "
                f"and {text}."
            )
        return prefix

    def chat(self, message: str) -> list[int]:
        """Return the token ids of a user message and the start of the assistant's turn, in the chat template.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(f"The tokenizer of {self.name} has no chat template. Leave --chat out.")
        messages = [{"role": "user", "content": message}]
        return self.encode(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def tensor(self, ids: list[int]) -> torch.Tensor:
        """Return token ids as a tensor [1, n] on the model's device."""
        return torch.tensor([ids], device=self.model.device)

    def facts(self) -> dict[str, Any]:
        """Return the model's properties for the report."""
        config = self.model.config
        return {
            "model_type": config.model_type,
            "variant": getattr(config, "diff_variant", None),
            "parameters": self.model.num_parameters(),
            "positions": getattr(config.get_text_config(), "max_position_embeddings", None),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "attention": config._attn_implementation,
        }


@dataclass(frozen=True)
class ModelSpec:
    """A model that a run loads when it measures it: its name, the facts that identify it, and how to load it."""

    name: str
    facts: dict[str, Any]
    load: Callable[[], Any]


def model_spec(
    name: str,
    *,
    dtype: DType = "auto",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """Find a model and its tokenizer, downloading them if necessary, to be loaded later from safetensors.

    The facts are the name, the repository's commit, the SHA-256 of the files, and the options of loading.

    Args:
        name: folder, or repository `owner/name` of the Hub.
        dtype: dtype of weights and computation; `auto` is the checkpoint's.
        device: torch's name of the device; by default the first GPU, or the CPU.
        revision: branch, tag or commit of a repository.
        trust_remote_code: whether code in the folder may run; a differential Llama needs none.

    Raises:
        FileNotFoundError: there is neither a folder with a config.json nor a repository of this name.
        ValueError: `revision` is given for a folder, or torch cannot compute on the device. The returned `load` raises
            it if the model cannot be loaded, weights are missing, or the tokenizer has more tokens than the model.
    """
    folder = locate(name, revision, OWN_FILES)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name or 'An empty name'} is not a folder with a config.json. Name a model folder.")
    place = available_device(device)
    commit = {"commit": folder.name} if folder.parent.name == "snapshots" else {}
    options = {"trust_remote_code": trust_remote_code}
    facts = {"name": name, **commit, "sha256": digest(folder, OWN_FILES), "dtype": dtype, "device": place.type}

    def load() -> LoadedModel:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        except Exception as error:  # whatever a library raises on a broken folder
            raise ValueError(f"{name} cannot be loaded from safetensors: {error}") from error
        if missing := sorted(map(str, {*loading_info["missing_keys"], *loading_info["mismatched_keys"]})):
            raise ValueError(f"{name} lacks {len(missing)} of its model's weights: {', '.join(missing[:3])}, …")
        embeddings = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > embeddings:
            raise ValueError(
                f"{name}: the tokenizer must have at most {embeddings:,} tokens, the embeddings of the model, got "
                f"{len(tokenizer):,}."
            )
        return LoadedModel(name=name, model=model.to(place).eval(), tokenizer=tokenizer)

    return ModelSpec(name, facts | options, load)
