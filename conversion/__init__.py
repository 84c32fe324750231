# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints of other models into ours."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_accelerate_available, is_gguf_available

from diffllama.conversion import llama
from diffllama.conversion.output_folder import check_free, new_folder
from diffllama.conversion.weight_map import apply_weight_map
from diffllama.hub_cards import converted_card
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaForCausalLM


SOURCES = {"llama": llama}
"""Name of a source -> the module with its `convert_config`, `WEIGHT_MAP` and `new_weights`."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def convert(
    src: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    source: str = "llama",
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Converts a checkpoint into a complete Hub folder of ours.

    The folder has weights as safetensors, a configuration with `auto_map`, the model's code, tokenizer and generation
    configuration if the source has them, and a card. It appears at `dest` complete or not at all.

    Args:
        src: a folder with a Transformers checkpoint, or a GGUF file (needs the packages of the extra `gguf`).
        dest: the folder to make.
        source: what `src` is, a key of `SOURCES`.
        dtype: `"float32"`, `"bfloat16"`, `"float16"`, or `"auto"` for the dtype in which the source is stored (a GGUF
            file is expanded to float32).
        overwrite: whether a `dest` that exists is replaced, if it is a model folder.
        progress: called with the number of tensors converted and their total.

    Returns:
        `dest`, absolute.

    Raises:
        FileNotFoundError: `src` does not exist.
        FileExistsError: `dest` may not be replaced (see `new_folder`), or it overlaps with `src`.
        ValueError: an unknown `source` or `dtype`, or a source with a feature that our model lacks.
        ImportError: `src` is a GGUF file and the packages of the extra `gguf` are not installed.
    """
    src, dest = Path(os.path.abspath(src)), Path(os.path.abspath(dest))
    if source not in SOURCES:
        raise ValueError(f"Unknown source {source!r}. Known: {', '.join(SOURCES)}.")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"`dtype` must be 'auto', 'float32', 'bfloat16' or 'float16', got {dtype!r}.")
    check_source(src)
    real_src, real_dest = src.resolve(), dest.resolve()  # links may hide that one is in the other
    if real_dest == real_src or real_dest in real_src.parents or real_src in real_dest.parents:
        raise FileExistsError(f"{dest} and {src} overlap. Name a folder outside of the source.")
    check_free(dest, overwrite)

    location = folder_location(src) if src.is_dir() else gguf_location(src)
    rules = SOURCES[source]
    config = rules.convert_config(AutoConfig.from_pretrained(**location))  # refuses before any weight is read
    original, report = AutoModelForCausalLM.from_pretrained(**location, dtype=dtype, output_loading_info=True)
    check_complete(report, f"{src} and its configuration do not match")

    if config.tie_word_embeddings and original.lm_head.weight is not original.model.embed_tokens.weight:
        config.tie_word_embeddings = False  # the checkpoint has both, and they differ
    weights = original.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]  # the same tensor as the embedding
    weights = apply_weight_map(weights, rules.WEIGHT_MAP, config, progress)
    weights |= rules.new_weights(config, original.dtype)
    model, report = DiffLlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=original.dtype, output_loading_info=True
    )
    check_complete(report, f"The weight map of {source!r} and our model do not match")
    model.generation_config = original.generation_config
    has_tokenizer = src.is_file() or any((src / name).exists() for name in TOKENIZER_FILES)
    tokenizer = AutoTokenizer.from_pretrained(**location) if has_tokenizer else None

    with new_folder(dest, overwrite) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        converted_card(model, tokenizer, source).save(folder / "README.md")
    return dest


def check_source(src: Path) -> None:
    """Raises `FileNotFoundError` or `ValueError` unless `src` looks like a checkpoint."""
    if not src.exists():
        raise FileNotFoundError(f"{src} does not exist. Name a folder with config.json and weights, or a GGUF file.")
    if src.is_dir() and not (src / "config.json").is_file():
        raise FileNotFoundError(f"{src} has no config.json, so it is not a Transformers checkpoint.")
    if src.is_file() and src.suffix.lower() != ".gguf":
        raise ValueError(f"{src} is neither a folder nor a .gguf file.")


def folder_location(folder: Path) -> dict[str, Any]:
    """The arguments with which transformers loads what is in a folder, without running code from there."""
    return {"pretrained_model_name_or_path": folder, "trust_remote_code": False}


def gguf_location(src: Path) -> dict[str, Any]:
    """Likewise for a GGUF file, a file of its folder. Raises `ImportError` without the packages that this needs."""
    if not (is_gguf_available() and is_accelerate_available()):
        raise ImportError("Reading a GGUF file needs gguf and accelerate: pip install 'diffllama[gguf]'.")
    return folder_location(src.parent) | {"gguf_file": src.name}


def check_complete(report: dict[str, Any], message: str) -> None:
    """Raises `ValueError` if a model's loading report has missing, unexpected or misshapen tensors."""
    faults = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if faults:
        shown = "; ".join(f"{kind}: {', '.join(names[:5])}{', …' * (len(names) > 5)}" for kind, names in faults.items())
        raise ValueError(f"{message}: {shown}.")


__all__ = ["SOURCES", "convert"]
