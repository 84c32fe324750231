# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What benchmarks compare: models of the same sizes, and the attention functions that compute them."""

import copy
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import transformers
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM
from diffllama.configuration import SHARED_FIELDS, baseline, preset


Architecture = Literal["llama", "transformers", "v1", "v2", "llama-4to1", "v2-4to1"]
"""The matched Llama, transformers' own `diffllama`, and ours; and with four heads on each key/value head the Llama, and
our V2 with one noise head for these four."""

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
"""Ours."""

OURS = ("diff_attention", "sdpa", "flash_attention_2")
"""Attention functions that ours are timed with, as far as they are there."""

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
"""Name -> the Llama of this shape: a tiny one to try commands, the goals', SmolLM2-135M and Llama 3.2 1B."""

SHAPE_NAMES = (*SHAPES, "3b")
POSITIONS = 65536
"""No timed sequence is longer."""


@dataclass(frozen=True)
class Setting:
    """What a case is measured at.

    Args:
        shape: of `SHAPE_NAMES`.
        batch: sequences.
        length: tokens of each: of the prompt, of the cache, of what is learned.
        dtype: of weights and computation, as torch names it.
        device: "cpu" or "cuda".
        groups: queries that share a key in the Llama, 1 for multi-head attention; the shape's own by default.
        new_tokens: how many are generated from each prompt.
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
        """`dtype` as torch's."""
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        groups = "" if self.groups is None else f", {self.groups} queries a key"
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
        """Whether goals are for it."""
        return self.architecture in DIFFERENTIAL

    @property
    def reference(self) -> "Implementation":
        """The Llama to whose time ratios are."""
        return Implementation("llama-4to1" if self.architecture.endswith("4to1") else "llama")


def llama(shape: str, groups: int | None = None) -> LlamaConfig:
    """The Llama of a shape, with so many queries for each key if it is said.

    Raises:
        ValueError: heads cannot be grouped so.
    """
    if shape == "3b":
        config = baseline(preset("3b", max_position_embeddings=POSITIONS))
    else:
        config = LlamaConfig(**SHAPES[shape], max_position_embeddings=POSITIONS, rms_norm_eps=1e-5)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, None  # nothing ends a generated text
    heads = config.num_attention_heads
    if groups is not None:
        if heads % groups:
            raise ValueError(f"{heads} heads of {shape} cannot share keys {groups} by {groups}.")
        config.num_key_value_heads = heads // groups
    return config


def applies(architecture: Architecture, llama: LlamaConfig) -> bool:
    """Whether there is such a model of these sizes: V1 and transformers' `diffllama` pair heads, and keys."""
    if architecture.endswith("4to1"):
        return llama.num_attention_heads % 4 == 0
    return architecture in ("llama", "v2") or not (llama.num_attention_heads % 2 or llama.num_key_value_heads % 2)


def configuration(architecture: Architecture, llama: LlamaConfig) -> PretrainedConfig:
    """Of the model with the Llama's hidden width, depth, and keys and values of the same size.

    V1 has half as many heads of twice the width; V2 as many heads of the same width, each with a noise query or four
    with the same one. The latter, and the Llama for it, have a quarter as many keys as heads.
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
    """A model with random weights, always the same ones."""
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
    """Whether an attention function is registered, and can compute the setting."""
    if implementation.startswith("flash_attention"):
        there = importlib.util.find_spec("flash_attn") is not None
        return there and setting.device == "cuda" and setting.dtype != "float32"
    return implementation == "eager" or implementation in AttentionInterface().valid_keys()


def implementations(
    setting: Setting, architectures: Sequence[str] = ARCHITECTURES, attention: Sequence[str] | None = None
) -> list[Implementation]:
    """What is compared in a setting, a Llama first.

    Args:
        setting: where.
        architectures: these and their Llamas.
        attention: functions that compute ours; by default those of `OURS` that are installed. The others are timed with
            `sdpa` and, if it is among them, flash-attn.

    Raises:
        ValueError: there is no such architecture, or attention function.
    """
    for name in architectures:
        if name not in ARCHITECTURES:
            raise ValueError(f"No architecture {name!r}. Known: {', '.join(ARCHITECTURES)}.")
    for name in attention or ():
        if not available(name, setting):
            raise ValueError(f"No attention function {name!r} for {setting.dtype} on {setting.device}.")
    ours = attention or [name for name in OURS if available(name, setting)]
    others = ["sdpa", *(name for name in ours if name.startswith("flash_attention"))]
    sizes = llama(setting.shape, setting.groups)
    chosen = {*architectures, *(Implementation(name).reference.architecture for name in architectures)}
    return [
        Implementation(architecture, name)
        for architecture in ARCHITECTURES
        if architecture in chosen and applies(architecture, sizes)
        for name in (ours if architecture in DIFFERENTIAL else others)
    ]
