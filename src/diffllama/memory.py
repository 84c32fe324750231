# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What memory a model takes when it generates, from its configuration alone."""

import os
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PretrainedConfig

from diffllama.choices import DType
from diffllama.configuration import preset, preset_names
from diffllama.conversion.transformers_models import meta_model
from diffllama.files import locate


@dataclass(frozen=True)
class Memory:
    """Bytes that a model takes when it generates.

    Args:
        weights: parameters, tied ones once.
        cache: keys and values of all tokens. Layers with a sliding window keep no more than it.
        cache_per_token: of one token of one sequence, in all layers.
        activations: the most that is computed at a time while the prompts are read, all at once and without maps in
            memory (every implementation but `eager`).
        dtype: of all of these.
    """

    weights: int
    cache: int
    cache_per_token: int
    activations: int
    dtype: torch.dtype

    @property
    def total(self) -> int:
        """Weights, cache and activations."""
        return self.weights + self.cache + self.activations


def read_config(src: str | os.PathLike[str], revision: str | None = None) -> PretrainedConfig:
    """A configuration: of a model's folder, `config.json`, a repository of the Hub, or one of the paper's presets.

    Raises:
        FileNotFoundError: there is none of these.
        ValueError: it is no configuration of a model that transformers or this package knows.
    """
    if os.fspath(src) in preset_names() and not os.path.exists(src):
        return preset(os.fspath(src))
    path = locate(src, revision, ["config.json"])
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Give a model's folder, or a preset: {', '.join(preset_names())}."
        )
    try:
        return AutoConfig.from_pretrained(file)
    except (OSError, ValueError, KeyError, TypeError) as error:  # not JSON, not of a model
        raise ValueError(f"{file} is no model's configuration: {error}") from error


def memory(config: PretrainedConfig, context: int, batch: int = 1, dtype: DType = "auto") -> Memory:
    """What a language model of Llama's build, differential or not, takes when it generates.

    Args:
        config: its configuration.
        context: tokens of each sequence, prompt and answer.
        batch: sequences at a time.
        dtype: of weights, cache and activations. `auto` is the configuration's, float32 where it names none.

    Raises:
        ValueError: `context` or `batch` is not positive, or the model is none of a known build.
    """
    for name, number in (("context", context), ("batch", batch)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}.")
    known = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    missing = [name for name in known if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise ValueError(f"A {config.model_type} is not built like a Llama: its configuration has no {missing[0]}.")
    said: str | torch.dtype = (config.dtype or "float32") if dtype == "auto" else dtype
    own: torch.dtype = getattr(torch, said) if isinstance(said, str) else said
    weights = sum(parameter.numel() for parameter in meta_model(config).parameters())

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_and_value = 2 * config.num_key_value_heads * head_dim
    window = getattr(config, "sliding_window", None)
    of_all = "sliding_attention" if window else "full_attention"
    types = getattr(config, "layer_types", None) or [of_all] * config.num_hidden_layers
    kept = sum(min(context, window) if window and layer == "sliding_attention" else context for layer in types)

    # Numbers a token of what the two halves of a layer have at their fullest: hidden states, of the model's input, the
    # layer's input and so on; queries while they are rotated; queries, both maps' outputs and their difference, which
    # is computed in float32; gate, up and their product.
    maps, rotary_dim = config.num_attention_heads, getattr(config, "rotary_dim", head_dim)
    rotated, subtracted = 4 * maps * rotary_dim, (3 if own.itemsize >= 4 else 5) * maps * head_dim
    attention = 3 * config.hidden_size + max(rotated, subtracted if hasattr(config, "diff_variant") else 0)
    mlp = 5 * config.hidden_size + 3 * config.intermediate_size
    activations = batch * (context * max(attention, mlp) + config.vocab_size) + 2 * context * rotary_dim
    return Memory(
        weights=weights * own.itemsize,
        cache=batch * kept * key_and_value * own.itemsize,
        cache_per_token=len(types) * key_and_value * own.itemsize,
        activations=activations * own.itemsize,
        dtype=own,
    )
