# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What memory a model takes when it generates, from its configuration alone."""

import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from diffllama.checkpoints.files import locate
from diffllama.checkpoints.json_files import read_json
from diffllama.checkpoints.models import meta_model
from diffllama.checkpoints.options import DType
from diffllama.configuration import preset, preset_names


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


LARGEST = {"num_hidden_layers": 1000, "num_labels": 10**6}
"""What a configuration may ask for. Of more, transformers makes lists and modules for hours."""

MATRICES = re.compile(r"layers\.\d+\.(self_attn\.(q|k|v|qkv|o|lambda)|mlp\.(gate|up|gate_up|down))_proj\.weight")
"""Weights of two dimensions in a layer of Llama's build, ours included."""


def read_config(src: str | os.PathLike[str], revision: str | None = None) -> PretrainedConfig:
    """A configuration: of a model's folder, `config.json`, a repository of the Hub, or a preset.

    Code of the folder is not run.

    Raises:
        FileNotFoundError: there is none of these.
        ValueError: it is no configuration of a model that transformers or this package knows, or too large, or
            `revision` is given for something that is no repository.
    """
    if os.fspath(src) in preset_names() and not os.path.exists(src):
        if revision is not None:
            raise ValueError(f"`revision` goes with a repository of the Hub; {src} is a preset, got {revision!r}.")
        return preset(os.fspath(src))
    path = locate(src, revision, ["config.json"])
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Give a model's folder, or a preset: {', '.join(preset_names())}."
        )
    fields = read_json(file)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        reason = " Code of its own is not run." if "auto_map" in fields else ""
        raise ValueError(f"{file}: neither transformers nor diffllama knows the `model_type` {kind!r}.{reason}")
    for name, largest in LARGEST.items():
        if isinstance(fields.get(name), int | float) and fields[name] > largest:
            raise ValueError(f"{file}: `{name}` must be at most {largest:,}, got {fields[name]:,}.")
    if isinstance(fields.get("dtype"), str):
        torch_dtype(fields["dtype"])
    try:
        return AutoConfig.from_pretrained(file, trust_remote_code=False)
    except Exception as error:  # as many kinds as there are configurations
        raise ValueError(f"{file} is no configuration of a {kind}: {error}") from error


def llama_like_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a configuration, without values.

    Raises:
        ValueError: it is not of Llama's build: it has other weights (compressed keys and values, mixtures of experts,
            states instead of a cache), or keys and values whose width differs from layer to layer.
    """
    kind = f"A {config.model_type} is not built like a Llama"
    if getattr(config, "is_heterogeneous", False):
        raise ValueError(f"{kind}: its layers differ.")
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        number = getattr(config, name, None)
        if not isinstance(number, int):
            raise ValueError(f"{kind}: its configuration has no {name}.")
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}.")
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(f"{kind}: its `layer_types` have {', '.join(sorted(other))}.")
    if getattr(config, "quantization_config", None):
        raise ValueError("`quantization_config`: what quantized weights take is not known here.")
    try:
        model = meta_model(config)
    except Exception as error:  # as many kinds as there are models
        raise ValueError(f"No {config.model_type} can be built from this configuration: {error}") from error
    key_or_value = config.num_key_value_heads * head_dim_of(config)
    widths = {
        "k_proj": key_or_value,
        "v_proj": key_or_value,
        "qkv_proj": 2 * key_or_value + config.num_attention_heads * head_dim_of(config),  # Phi-3
    }
    for name, weight in model.named_parameters():
        if "layers." not in name or weight.ndim < 2:
            continue
        if not MATRICES.search(name):
            raise ValueError(f"{kind}: it has the weights {name}.")
        width = widths.get(name.split(".")[-2], len(weight))
        if len(weight) != width:
            raise ValueError(f"{kind}: {name} has {len(weight)} rows instead of {width}.")
    return model


def head_dim_of(config: PretrainedConfig) -> int:
    """Width of a key."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def torch_dtype(dtype: Any) -> torch.dtype:
    """A dtype, or the one of this name. Raises `ValueError` if there is none."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise ValueError(f"`dtype` must be one of PyTorch's, got {dtype!r}.")
    return named


def memory(config: PretrainedConfig, context: int, batch: int = 1, dtype: DType = "auto") -> Memory:
    """What a language model of Llama's build, differential or not, takes when it generates.

    Args:
        config: its configuration.
        context: tokens of each sequence, prompt and answer.
        batch: sequences at a time.
        dtype: of weights, cache and activations. `auto` is the configuration's, float32 where it names none.

    Raises:
        ValueError: `context` or `batch` is not positive or no 64-bit number, the `dtype` is none of PyTorch's, or the
            model is not of Llama's build.
    """
    for name, number in (("context", context), ("batch", batch)):
        if not 1 <= number < 2**63:
            raise ValueError(f"`{name}` must be at least 1 and below 2**63, got {number}.")
    own = torch_dtype((config.dtype or "float32") if dtype == "auto" else dtype)
    weights = sum(parameter.numel() for parameter in llama_like_model(config).parameters())
    head_dim = head_dim_of(config)
    key_and_value = 2 * config.num_key_value_heads * head_dim
    window = getattr(config, "sliding_window", None)
    of_all = "sliding_attention" if window else "full_attention"
    types = getattr(config, "layer_types", None) or [of_all] * config.num_hidden_layers
    kept = sum(min(context, window) if window and layer == "sliding_attention" else context for layer in types)

    # Numbers a token of what the two halves of a layer have at their fullest: hidden states, of the model's input, the
    # layer's input and so on; queries while they are rotated; queries, all maps' outputs and, in float32, noise times λ
    # and differences; queries, and heads while they are normalised in float32; gate, up and their product; four numbers
    # in float32 for each of PolyNorm's input.
    maps, rotary_dim = config.num_attention_heads, getattr(config, "rotary_dim", head_dim)
    signals, half = getattr(config, "num_signal_heads", 0), own.itemsize < 4
    scaled = maps - signals if getattr(config, "diff_variant", "v2") == "v1" else signals  # V2's λ is a signal's
    subtracted = 2 * maps + (2 * scaled + 4 * signals if half else scaled + signals)
    normalised = maps + (6 if half else 3) * signals
    attention = 3 * config.hidden_size + max(4 * maps * rotary_dim, max(subtracted, normalised) * head_dim)
    inner = 3 if getattr(config, "gated_mlp", True) else 2
    if getattr(config, "hidden_act", None) == "poly_norm":
        inner = 9 if half else 4
    mlp = 5 * config.hidden_size + inner * config.intermediate_size
    activations = batch * (context * max(attention, mlp) + config.vocab_size) + 2 * context * rotary_dim
    return Memory(
        weights=weights * own.itemsize,
        cache=batch * kept * key_and_value * own.itemsize,
        cache_per_token=len(types) * key_and_value * own.itemsize,
        activations=activations * own.itemsize,
        dtype=own,
    )
