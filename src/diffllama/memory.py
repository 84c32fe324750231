# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory that a model needs to generate text, from its configuration alone."""

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
    """Memory in bytes that a model needs to generate text.

    Args:
        weights: parameters; tied parameters count once.
        cache: KV cache of all tokens. Layers with a sliding window store at most its tokens.
        cache_per_token: KV cache of one token of one sequence, in all layers.
        activations: peak during a prefill of all prompts at once, with an attention function that does not store the
            softmax maps (any but `eager`).
        dtype: dtype of weights, cache and activations.
    """

    weights: int
    cache: int
    cache_per_token: int
    activations: int
    dtype: torch.dtype

    @property
    def total(self) -> int:
        """Sum of weights, cache and activations."""
        return self.weights + self.cache + self.activations


LARGEST = {"num_hidden_layers": 1000, "num_labels": 10**6}
"""Largest values that a configuration may have. With larger ones, transformers builds lists and modules for hours."""

MATRICES = re.compile(r"layers\.\d+\.(self_attn\.(q|k|v|qkv|o|lambda)|mlp\.(gate|up|gate_up|down))_proj\.weight")
"""Names of the 2D weights in a layer of a Llama or of a diffllama model."""


def read_config(src: str | os.PathLike[str], revision: str | None = None) -> PretrainedConfig:
    """Read a configuration without running code of its folder.

    Args:
        src: model folder, path of a `config.json`, repository of the Hub, or name of a preset.
        revision: branch, tag or commit of the repository.

    Raises:
        FileNotFoundError: `src` is none of these.
        ValueError: neither transformers nor this package knows the model, or the configuration is invalid or too
            large, or `src` has a `revision` but is no repository.
    """
    if os.fspath(src) in preset_names() and not os.path.exists(src):
        if revision is not None:
            raise ValueError(f"`revision` goes with a repository of the Hub; {src} is a preset, got {revision!r}.")
        return preset(os.fspath(src))
    path = locate(src, revision, ["config.json"])
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist. Name a model folder, a repository of the Hub, or a preset: "
            f"{', '.join(preset_names())}."
        )
    fields = read_json(file)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        reason = " The model's own code is not run." if "auto_map" in fields else ""
        raise ValueError(f"{file}: transformers and diffllama have no `model_type` {kind!r}.{reason}")
    for name, largest in LARGEST.items():
        if isinstance(fields.get(name), int | float) and fields[name] > largest:
            raise ValueError(f"{file}: `{name}` must be at most {largest:,}, got {fields[name]:,}.")
    if isinstance(fields.get("dtype"), str):
        torch_dtype(fields["dtype"])
    try:
        return AutoConfig.from_pretrained(file, trust_remote_code=False)
    except Exception as error:  # each configuration class raises its own types
        raise ValueError(f"{file} is not a valid configuration of `model_type` {kind!r}: {error}") from error


def llama_like_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model of a configuration on the meta device.

    Raises:
        ValueError: the model does not have a Llama's layers: it has other weights (compressed keys and values, mixtures
            of experts, states instead of a KV cache), or the width of its keys and values differs between layers.
    """
    kind = f"`model_type` {config.model_type!r} does not have a Llama's layers"
    if getattr(config, "is_heterogeneous", False):
        raise ValueError(f"{kind}: its layers differ from each other.")
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        number = getattr(config, name, None)
        if not isinstance(number, int):
            raise ValueError(f"{kind}: its configuration has no integer `{name}`.")
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}.")
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(f"{kind}: its `layer_types` contain {', '.join(sorted(other))}.")
    if getattr(config, "quantization_config", None):
        raise ValueError("`quantization_config` is set: the memory of quantized weights cannot be estimated.")
    try:
        model = meta_model(config)
    except Exception as error:  # each model class raises its own types
        raise ValueError(f"Cannot build a {config.model_type} from this configuration: {error}") from error
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
            raise ValueError(f"{kind}: it has the weight {name}.")
        width = widths.get(name.split(".")[-2], len(weight))
        if len(weight) != width:
            raise ValueError(f"{kind}: {name} has {len(weight)} rows instead of {width}.")
    return model


def head_dim_of(config: PretrainedConfig) -> int:
    """Return the width of a key head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return a dtype given by itself or by its name.

    Raises:
        ValueError: PyTorch has no such dtype.
    """
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise ValueError(f"`dtype` must be a dtype of PyTorch, got {dtype!r}.")
    return named


def memory(config: PretrainedConfig, context: int, batch: int = 1, dtype: DType = "auto") -> Memory:
    """Estimate the memory that a language model with a Llama's layers, differential or not, needs to generate text.

    Args:
        config: configuration of the model.
        context: tokens per sequence, prompt and answer together.
        batch: batch size in sequences.
        dtype: dtype of weights, cache and activations. `auto` is the configuration's, or float32 if it has none.

    Raises:
        ValueError: `context` or `batch` is below 1 or not below 2**63, `dtype` is not a dtype of PyTorch, or the model
            does not have a Llama's layers.
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

    # Numbers per token that exist at the peak of the attention and of the MLP of a layer. Attention: hidden states
    # (input of the model, of the layer, ...), and the largest of: queries during rotation; queries, outputs of all maps
    # and, in float32, λ times noise and the differences; queries, and heads during their normalization in float32.
    # MLP: hidden states, and gate, up and their product, or four float32 numbers per input of PolyNorm.
    maps, rotary_dim = config.num_attention_heads, getattr(config, "rotary_dim", head_dim)
    signals, half = getattr(config, "num_signal_heads", 0), own.itemsize < 4
    scaled = maps - signals if getattr(config, "diff_variant", "v2") == "v1" else signals  # V2 has a λ per signal head
    subtracted = 2 * maps + (2 * scaled + 4 * signals if half else scaled + signals)
    normalized = maps + (6 if half else 3) * signals
    attention = 3 * config.hidden_size + max(4 * maps * rotary_dim, max(subtracted, normalized) * head_dim)
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
