# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The implementations that benchmarks compare: models of the same sizes, each with several attention functions."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import transformers
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM
from diffllama.configuration import SHARED_FIELDS, baseline, preset


Architecture = Literal["llama", "transformers", "v1", "v2", "llama-4to1", "v2-4to1"]
"""The matched Llama, transformers' own `diffllama`, and our V1 and V2. `4to1` has four query heads per key/value head;
V2 then has one noise head per four signal heads."""

ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
NAMES = {
    "llama": "llama",
    "transformers": "transformers diffllama",
    "v1": "ours V1",
    "v2": "ours V2",
    "llama-4to1": "llama 4:1",
    "v2-4to1": "ours V2 4:1",
}
DIFFERENTIAL: tuple[Architecture, ...] = ("v1", "v2", "v2-4to1")
"""Architectures of this package."""

FLASH = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
"""Attention function of flash-attn -> whether its version is installed and finds a GPU."""

OURS = ("diff_attention", "sdpa", *FLASH)
"""Attention functions of `DIFFERENTIAL` architectures, where they are installed."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    | {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512},
    "small": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
    | {"num_key_value_heads": 12, "head_dim": 64, "vocab_size": 4096},
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
}
"""Name -> fields of the Llama: one for trying commands, the one of the goals, SmolLM2-135M and Llama 3.2 1B."""

SHAPE_NAMES = (*SHAPES, "3b")
POSITIONS = 65536
"""`max_position_embeddings` of every model: the longest sequence that can be timed."""


@dataclass(frozen=True)
class Setting:
    """Sizes, dtype and device of a measurement.

    Args:
        shape: model size, one of `SHAPE_NAMES`.
        batch: batch size in sequences.
        length: tokens per sequence: of the prompt, of the KV cache or of a training batch.
        dtype: PyTorch's name of the dtype of weights and computation.
        device: "cpu" or "cuda".
        groups: query heads per key/value head of the Llama, 1 for multi-head attention; `None` for those of the shape.
        new_tokens: tokens to generate per prompt.
    """

    shape: str
    batch: int
    length: int
    dtype: str = "float32"
    device: str = "cpu"
    groups: int | None = None
    new_tokens: int = field(default=64, compare=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a `torch.dtype`."""
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        groups = "" if self.groups is None else f", {self.groups} query heads per key"
        return f"{self.shape}{groups}, {self.batch} × {self.length:,} tokens, {self.dtype}"


@dataclass(frozen=True)
class Implementation:
    """A model and the attention function that computes it."""

    architecture: Architecture
    attention: str = "sdpa"

    def __str__(self) -> str:
        return f"{NAMES[self.architecture]}, {self.attention}"

    @property
    def ours(self) -> bool:
        """Whether it is a model of this package, to which the goals apply."""
        return self.architecture in DIFFERENTIAL

    @property
    def reference(self) -> "Implementation":
        """The matched Llama, whose time is the denominator of ratios."""
        return Implementation("llama-4to1" if self.architecture.endswith("4to1") else "llama")


def llama(shape: str, groups: int | None = None) -> LlamaConfig:
    """Return the configuration of the Llama of a shape.

    Args:
        shape: one of `SHAPE_NAMES`.
        groups: query heads per key/value head; `None` for those of the shape.

    Raises:
        ValueError: `groups` does not divide the number of heads.
    """
    if shape == "3b":
        config = baseline(preset("3b", max_position_embeddings=POSITIONS))
    else:
        config = LlamaConfig(**SHAPES[shape], max_position_embeddings=POSITIONS, rms_norm_eps=1e-5)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, None  # no token stops generation
    heads = config.num_attention_heads
    if groups is not None:
        if heads % groups:
            raise ValueError(f"The {heads} heads of shape {shape} cannot be divided into groups of {groups}.")
        config.num_key_value_heads = heads // groups
    return config


def applies(architecture: Architecture, llama: LlamaConfig) -> bool:
    """Tell whether the architecture exists with a Llama's sizes.

    V1 and transformers' `diffllama` need even numbers of heads and key/value heads; `4to1` needs a multiple of 4 heads.
    """
    if architecture.endswith("4to1"):
        return llama.num_attention_heads % 4 == 0
    return architecture in ("llama", "v2") or not (llama.num_attention_heads % 2 or llama.num_key_value_heads % 2)


def configuration(architecture: Architecture, llama: LlamaConfig) -> PretrainedConfig:
    """Return the configuration that matches a Llama in hidden size, depth and size of the KV cache.

    V1 has half as many heads of twice the width. V2 has as many signal heads of the same width, with a noise head each.
    In `v2-4to1`, four signal heads share a noise head, and like `llama-4to1` it has a key/value head per four heads.
    """
    heads, keys, width = llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim
    noise = heads
    if architecture.endswith("4to1"):
        noise = keys = heads // 4
    if architecture.startswith("llama"):
        llama = copy.deepcopy(llama)
        llama.num_key_value_heads = keys
        return llama
    shared = {name: copy.deepcopy(getattr(llama, name)) for name in SHARED_FIELDS}
    if architecture == "transformers":
        del shared["mlp_bias"], shared["dtype"]
        return transformers.DiffLlamaConfig(
            **shared, num_attention_heads=heads, num_key_value_heads=keys, head_dim=width
        )
    if architecture == "v1":
        return DiffLlamaConfig(**shared, num_attention_heads=heads, num_key_value_heads=keys // 2, head_dim=2 * width)
    sizes = {"num_attention_heads": heads + noise, "num_noise_heads": noise, "num_key_value_heads": keys}
    return DiffLlamaConfig(**shared, **sizes, diff_variant="v2", head_dim=width)


def build(
    architecture: Architecture, setting: Setting, implementation: str = "sdpa", dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Build a model with random weights from a fixed seed, in the setting's dtype unless `dtype` is given."""
    classes = {
        **dict.fromkeys(("llama", "llama-4to1"), transformers.LlamaForCausalLM),
        "transformers": transformers.DiffLlamaForCausalLM,
        **dict.fromkeys(DIFFERENTIAL, DiffLlamaForCausalLM),
    }
    config = configuration(architecture, llama(setting.shape, setting.groups))
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = classes[architecture]._from_config(
            config, dtype=dtype or setting.torch_dtype, attn_implementation=implementation
        )
    return model.eval()


def available(implementation: str, setting: Setting) -> bool:
    """Tell whether an attention function is registered and supports the setting's device and dtype."""
    if implementation in FLASH:
        return FLASH[implementation]() and setting.device == "cuda" and setting.dtype != "float32"
    return implementation == "eager" or implementation in AttentionInterface().valid_keys()


def implementations(
    setting: Setting, architectures: Sequence[str] = ARCHITECTURES, attention: Sequence[str] | None = None
) -> list[Implementation]:
    """Return the implementations to compare in a setting, a Llama first.

    Args:
        setting: sizes, dtype and device.
        architectures: architectures to compare; the Llamas that they are compared with are added.
        attention: attention functions of our architectures, by default those of `OURS` that can run. The others run
            with `sdpa` and, if it is one of these functions, flash-attn.

    Raises:
        ValueError: an architecture is unknown, or an attention function cannot run in this setting.
    """
    for name in architectures:
        if name not in ARCHITECTURES:
            raise ValueError(f"Unknown architecture {name!r}. Known: {', '.join(ARCHITECTURES)}.")
    for name in attention or ():
        if not available(name, setting):
            raise ValueError(
                f"Attention function {name!r} cannot run in {setting.dtype} on {setting.device}, or is not installed."
            )
    ours = attention or [name for name in OURS if available(name, setting)]
    others = ["sdpa", *(name for name in ours if name in FLASH)]
    sizes = llama(setting.shape, setting.groups)
    chosen = {*architectures, *(Implementation(name).reference.architecture for name in architectures)}
    return [
        Implementation(architecture, name)
        for architecture in ARCHITECTURES
        if architecture in chosen and applies(architecture, sizes)
        for name in (ours if architecture in DIFFERENTIAL else others)
    ]
