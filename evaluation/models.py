# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Models to measure: any causal language model of transformers, differential or not, with its tokenizer."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from diffllama.checkpoints.files import locate
from diffllama.checkpoints.options import DType


OWN_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
"""Files of a model folder that determine what the model computes and how its tokenizer splits text."""


def digest(path: Path, patterns: tuple[str, ...] = ("**/*",)) -> str:
    """SHA-256 of a file, or of the names and bytes of a folder's visible files that match, as hexadecimal digits."""
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


def device(name: str | None) -> torch.device:
    """The named device; by default the first GPU, or the CPU.

    Raises:
        ValueError: torch cannot compute on it here.
    """
    try:
        place = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError) as error:  # NotImplementedError, of the device `meta`, is one of the former
        raise ValueError(f"--device: there is no {name} here that computes. Name another, such as cpu.") from error
    return place


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A loaded model to measure, in evaluation mode, and its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` alone, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def prefix(self) -> list[int]:
        """Token ids that the tokenizer puts before every text: usually the id of the BOS token, or none.

        Raises:
            ValueError: the tokenizer has no tokens for `a`, or other ones where it adds special tokens.
        """
        whole, text = self.tokenizer("a").input_ids, self.encode("a")
        prefixes = (whole[:at] for at in range(len(whole)) if text and whole[at : at + len(text)] == text)
        prefix = next(prefixes, None)
        if prefix is None:
            raise ValueError(f"The tokenizer of {self.name} makes {text} of `a`, but {whole} with special tokens.")
        return prefix

    def chat(self, message: str) -> list[int]:
        """Token ids of a user's message and the start of the assistant's turn, in the tokenizer's chat template.

        Raises:
            ValueError: it has none.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(f"The tokenizer of {self.name} has no chat template. Leave --chat out.")
        messages = [{"role": "user", "content": message}]
        return self.encode(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def tensor(self, ids: list[int]) -> torch.Tensor:
        """Token ids as [1, n] on the model's device."""
        return torch.tensor([ids], device=self.model.device)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from and how it is loaded.

    Args:
        name: folder, or repository `owner/name` of the Hub.
        dtype: of the weights and the computation; `auto` is the checkpoint's.
        device: torch's name for it; by default the first GPU, or the CPU.
        revision: branch, tag or commit of a repository.
        trust_remote_code: whether code in the folder may run; a differential Llama needs none.
    """

    name: str
    dtype: DType = "auto"
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    @cached_property
    def folder(self) -> Path:
        """The folder, or the snapshot of the Hub repository, downloaded if necessary.

        Raises:
            FileNotFoundError: there is no such folder with a configuration, and no such repository.
            ValueError: a revision of a folder.
        """
        folder = locate(self.name, self.revision, OWN_FILES)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{self.name or 'An empty name'} is not a folder with a config.json. Name a model's folder."
            )
        return folder

    @property
    def place(self) -> torch.device:
        """The device."""
        return device(self.device)

    def facts(self) -> dict[str, Any]:
        """What identifies the model in a report: its name, the commit of a repository, the SHA-256 of its files."""
        folder = self.folder
        commit = {"commit": folder.name} if folder.parent.name == "snapshots" else {}
        files = {"sha256": digest(folder, OWN_FILES)}
        chosen = {"dtype": self.dtype, "device": self.place.type, "trust_remote_code": self.trust_remote_code}
        return {"name": self.name, **commit, **files, **chosen}

    def load(self) -> LoadedModel:
        """The model in evaluation mode, and its tokenizer. Weights are in safetensors, as `facts` expects them.

        Raises:
            ValueError: they cannot be loaded, weights are missing, or the tokenizer is another model's.
        """
        options = {"trust_remote_code": self.trust_remote_code}
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, **options)
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=self.dtype, use_safetensors=True, output_loading_info=True, **options
            )
        except Exception as error:  # whatever a library raises on a broken folder
            raise ValueError(f"{self.name} cannot be loaded, with weights in safetensors: {error}") from error
        if missing := sorted(map(str, {*loading_info["missing_keys"], *loading_info["mismatched_keys"]})):
            raise ValueError(f"{self.name} lacks {len(missing)} of its model's weights: {', '.join(missing[:3])}, …")
        embeddings = model.get_input_embeddings().num_embeddings
        if len(tokenizer) > embeddings:
            raise ValueError(f"{self.name} has {embeddings:,} embeddings for a tokenizer of {len(tokenizer):,} tokens.")
        return LoadedModel(name=self.name, model=model.to(self.place).eval(), tokenizer=tokenizer)
