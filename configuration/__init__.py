# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Model sizes, training recipes, and the matched Transformer of each differential model."""

import copy
import functools
from importlib import resources
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML


if TYPE_CHECKING:
    from transformers import LlamaConfig

    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig


def read_yaml(text: str) -> Any:
    """Read YAML 1.2: 1e-3 is a number and `no` is a string.

    Raises:
        ruamel.yaml.error.YAMLError: the text is not YAML, or it has the same key twice.
    """
    return YAML(typ="safe", pure=True).load(text)


@functools.cache
def _entries(kind: str) -> dict[str, dict[str, Any]]:
    """Read the presets or recipes from their YAML file, without names that begin with a dot (YAML anchors)."""
    text = resources.files(__name__).joinpath(f"{kind}s.yaml").read_text(encoding="utf-8")
    return {name: fields for name, fields in read_yaml(text).items() if not name.startswith(".")}


def _entry(kind: str, name: str) -> dict[str, Any]:
    """Return a copy of a preset or recipe. Raises `ValueError` if there is none of that name."""
    entries = _entries(kind)
    if name not in list(entries):  # a file may give a list as the name, which is not hashable
        raise ValueError(f"No {kind} {name!r}. Known: {', '.join(entries)}.")
    return copy.deepcopy(entries[name])


def preset_names() -> list[str]:
    """Return the names of presets: the paper's 3B, grouped versions of it, the scaling study, and published models."""
    return list(_entries("preset"))


def preset(name: str, **overrides: Any) -> "DiffLlamaConfig":
    """Return a model configuration: of a model of the paper (arXiv 2410.05258, sections 3.1 and 3.2), of its 3B with
    four signal heads per noise head (`"3b-v1-4to1"`, `"3b-v2-4to1"`), or of Motif 2.6B, Motif 2 12.7B or Perdix 1.1B.

    Args:
        name: one of `preset_names()`.
        overrides: fields of `DiffLlamaConfig` that replace the preset's, such as `vocab_size`.

    Raises:
        ValueError: there is no preset of that name, or an override is invalid.
    """
    from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
    from diffllama.modeling_diff.differential_attention import exponential_lambda_init

    fields = _entry("preset", name) | overrides
    if fields.get("lambda_init") == "motif":
        fields["lambda_init"] = [exponential_lambda_init(i - 1) for i in range(fields["num_hidden_layers"])]
    return DiffLlamaConfig(**fields)


def recipe_names() -> list[str]:
    """Return the names of recipes."""
    return list(_entries("recipe"))


def recipe(name: str) -> dict[str, Any]:
    """Return the paper's training hyperparameters, as fields of a pre-training file.

    Args:
        name: one of `recipe_names()`: `"3b"` (section 3.1); `"scaling"` and `"scaling-large"` (section 3.2, up to 2.8B
            and above); `"long-context"` (section 3.3).

    Returns:
        `sequence_length` and `tokens_per_step`, in tokens; `training`, fields of transformers' `TrainingArguments`;
        and `model`, fields of `DiffLlamaConfig`, if the recipe changes some.

    Raises:
        ValueError: there is no recipe of that name.
    """
    return _entry("recipe", name)


# Fields with the same meaning in LlamaConfig and DiffLlamaConfig.
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
    """Return the configuration of the matched Transformer: the baseline of equal depth, width and parameters.

    For V1 it has twice as many heads as signal heads, of width d = D/2 (paper, section 3). For V2 it has as many heads
    as signal heads, of width D. Its KV cache has the same size. Its feed-forward has a gate, and `silu` in place of
    `poly_norm`. If the differential model has no gate or several signals per noise head, `intermediate_size` is changed
    so that the parameters match. Ungrouped V2 has more parameters than its baseline: the queries of the noise heads.

    Raises:
        ValueError: the configuration has a feature that no Llama has.
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
            raise ValueError(f"`{field}` must be {value}, which Llama requires, got {getattr(config, field)}.")
    assert config.num_key_value_heads is not None  # set when the configuration is made
    split = 2 if config.diff_variant == "v1" else 1  # the baseline's keys per differential key
    heads = split * config.num_signal_heads
    rows = (3 if config.gated_mlp else 2) * config.intermediate_size  # of matrices with `hidden_size` columns
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
