# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Model sizes and training recipes, and for each differential model the Transformer it is compared with."""

import copy
import functools
from importlib import resources
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML


if TYPE_CHECKING:
    from transformers import LlamaConfig

    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


def read_yaml(text: str) -> Any:
    """What YAML 1.2 says: 1e-3 is a number, `no` a text, and the same key twice an error, `ruamel.yaml.YAMLError`."""
    return YAML(typ="safe", pure=True).load(text)


@functools.cache
def _entries(kind: str) -> dict[str, dict[str, Any]]:
    """The presets or recipes in their YAML file; names that begin with a dot are only referred to there."""
    text = resources.files(__name__).joinpath(f"{kind}s.yaml").read_text(encoding="utf-8")
    return {name: fields for name, fields in read_yaml(text).items() if not name.startswith(".")}


def _entry(kind: str, name: str) -> dict[str, Any]:
    """One of them, which may be changed. Raises `ValueError` if there is none of that name."""
    entries = _entries(kind)
    if name not in list(entries):  # a file may name a list, which no dictionary can look up
        raise ValueError(f"No {kind} {name!r}. Known: {', '.join(entries)}.")
    return copy.deepcopy(entries[name])


def preset_names() -> list[str]:
    """Names that `preset` knows: the paper's main model `"3b"`, grouped versions of it, the paper's scaling study, and
    published models."""
    return list(_entries("preset"))


def preset(name: str, **overrides: Any) -> "DiffLlamaConfig":
    """The configuration of a model of the paper (arXiv 2410.05258, sections 3.1 and 3.2), of its 3B with four signal
    heads on each noise head (`"3b-v1-4to1"`, `"3b-v2-4to1"`), or of Motif 2.6B, Motif 2 12.7B or Perdix 1.1B.

    Args:
        name: one of `preset_names()`.
        overrides: fields of `DiffLlamaConfig` to set otherwise, such as `vocab_size`.

    Raises:
        ValueError: there is no preset of that name.
    """
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
    from diffllama.modeling_diff.differential_attention import exponential_lambda_init

    fields = _entry("preset", name) | overrides
    if fields.get("lambda_init") == "motif":
        fields["lambda_init"] = [exponential_lambda_init(i - 1) for i in range(fields["num_hidden_layers"])]
    return DiffLlamaConfig(**fields)


def recipe_names() -> list[str]:
    """Names that `recipe` knows."""
    return list(_entries("recipe"))


def recipe(name: str) -> dict[str, Any]:
    """How the paper trained, as the beginning of a pre-training configuration.

    Args:
        name: one of `recipe_names()`: `"3b"`; `"scaling"`, its study up to 2.8B, and `"scaling-large"`, above;
            `"long-context"`.

    Returns:
        `sequence_length` and `tokens_per_step`, in tokens; `training`, fields of transformers' `TrainingArguments`;
        and `model`, fields of `DiffLlamaConfig`, where the recipe changes some.

    Raises:
        ValueError: there is no recipe of that name.
    """
    return _entry("recipe", name)


# Fields that mean the same in a LlamaConfig and a DiffLlamaConfig.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "mlp_bias",
    "dtype",
)


def baseline(config: "DiffLlamaConfig") -> "LlamaConfig":
    """The Transformer of the same depth, width and cost in parameters that a differential model is compared with.

    V1: twice the signal heads, of width d = D/2 (paper, section 3). V2: as many heads as signal heads, of width D. Keys
    and values take the same room in a cache either way. The feed-forward has a gate, and `silu` instead of `poly_norm`.
    Where ours has no gate, or several signals share a noise head, `intermediate_size` makes the parameters equal. V2
    with a noise head for each signal has those queries more than its baseline.

    Raises:
        ValueError: the configuration has something that no Llama has.
    """
    from transformers import LlamaConfig

    plain = {
        "attention_out_bias": config.attention_bias,
        "use_qk_norm": False,
        "no_rope_layers": None,
        "sliding_window": None,
    }
    for field, value in plain.items():
        if getattr(config, field) != value:
            raise ValueError(f"`{field}` must be {value} (no Llama has it otherwise), got {getattr(config, field)}.")
    assert config.num_key_value_heads is not None  # set when the configuration is made
    split = 2 if config.diff_variant == "v1" else 1  # keys of the Transformer in the width of one of ours
    heads = split * config.num_signal_heads
    rows = (3 if config.gated_mlp else 2) * config.intermediate_size  # of weights that are `hidden_size` wide
    if config.signals_per_noise > 1:
        rows += (config.num_attention_heads - heads) * config.rotary_dim  # of q_proj
    fields = {field: copy.deepcopy(getattr(config, field)) for field in SHARED_FIELDS}
    fields["intermediate_size"] = round(rows / 3)
    if config.hidden_act == "poly_norm":
        fields["hidden_act"] = "silu"
    return LlamaConfig(
        **fields,
        num_attention_heads=heads,
        num_key_value_heads=split * config.num_key_value_heads,
        head_dim=config.rotary_dim,
    )


__all__ = ["SHARED_FIELDS", "baseline", "preset", "preset_names", "read_yaml", "recipe", "recipe_names"]
