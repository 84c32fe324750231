# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' own `diffllama` <-> DIFF V1.

Its head i of h consists of the query vectors i and i + h, and likewise of keys and values; ours are neighbours. Its
output projection reads heads in our order. It has no learned head norm, so `--to transformers` folds ours into the
output projection. The norm's ε is `rms_norm_eps`; ours has its own, so values are scaled.
"""

import reprlib

from transformers import DiffLlamaConfig as TransformersDiffLlamaConfig

from diffllama.configuration import SHARED_FIELDS
from diffllama.conversion import operations
from diffllama.conversion.llama import BODY
from diffllama.conversion.weight_map import Operation, Rule, WeightMap
from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.modeling_diff.modeling_diffllama import LAMBDA_VECTORS


MODEL_TYPES = ("diffllama",)

_ATTENTION = "model.layers.{i}.self_attn."
_OUTPUT, _NORM = f"{_ATTENTION}o_proj.weight", f"{_ATTENTION}head_norm.weight"
LAMBDAS = tuple(f"{_ATTENTION}{name}" for name in LAMBDA_VECTORS)


def _weight_map(reorder: Operation, *scale: Operation) -> WeightMap:
    heads = {
        f"{_ATTENTION}{name}_proj.{kind}": steps
        for name, steps in (("q", (reorder,)), ("k", (reorder,)), ("v", (reorder, *scale)))
        for kind in ("weight", "bias")
    }
    copied = (*BODY, *LAMBDAS, _OUTPUT, f"{_ATTENTION}o_proj.bias")
    return {name: Rule(name, heads.get(name, ())) for name in (*copied, *heads)}


FROM_TRANSFORMERS: WeightMap = {
    **_weight_map(operations.neighbours_from_halves),
    f"{_ATTENTION}rotary_emb.inv_freq": None,
}
TO_TRANSFORMERS = _weight_map(operations.halves_from_neighbours, operations.scale_to_their_epsilon)
TO_TRANSFORMERS_WITH_NORM: WeightMap = {
    **TO_TRANSFORMERS,
    _OUTPUT: Rule(_OUTPUT, (operations.fold_head_norm,), (_NORM,)),
    _NORM: None,  # folded into the output projection
}


def convert_config(source: TransformersDiffLlamaConfig) -> DiffLlamaConfig:
    """Return the V1 configuration with the same heads. Raises `ValueError` for odd numbers of heads and for ε = 0."""
    if source.num_attention_heads % 2 or source.num_key_value_heads % 2:
        raise ValueError(
            "`num_attention_heads` and `num_key_value_heads` of the source must be even, got "
            f"{source.num_attention_heads} and {source.num_key_value_heads}."
        )
    if not source.rms_norm_eps > 0:
        raise ValueError(f"`rms_norm_eps` of the source must be positive, got {source.rms_norm_eps}.")
    width = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    return DiffLlamaConfig(
        **{
            field: getattr(source, field) for field in SHARED_FIELDS if field != "mlp_bias"
        },  # transformers' model lacks these biases
        diff_variant="v1",
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads // 2,
        head_dim=2 * width,
        lambda_std_dev=source.lambda_std_dev,
        head_norm_affine=False,
        head_norm_eps=source.rms_norm_eps,
    )


def convert_config_back(config: DiffLlamaConfig) -> TransformersDiffLlamaConfig:
    """Return transformers' configuration of our heads. Raises `ValueError` for features that `diffllama` lacks."""
    refuse(
        config,
        "transformers' diffllama",
        diff_variant="v1",
        num_noise_heads=config.num_attention_heads // 2,
        lambda_init="exponential",
        head_norm=True,
        hidden_act="silu" if config.hidden_act == "poly_norm" else config.hidden_act,
        gated_mlp=True,
        mlp_bias=False,
        attention_out_bias=config.attention_bias,
        use_qk_norm=False,
        no_rope_layers=None,
        sliding_window=None,
        attention_dropout=0.0,
    )
    assert config.num_key_value_heads is not None  # set by the configuration's constructor
    return TransformersDiffLlamaConfig(
        **{field: getattr(config, field) for field in SHARED_FIELDS if field != "mlp_bias"},
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=2 * config.num_key_value_heads,
        head_dim=config.rotary_dim,
        lambda_std_dev=config.lambda_std_dev,
    )


def weight_map_back(config: DiffLlamaConfig) -> WeightMap:
    """Return the weight map, for a model of ours with or without a weight of its head norm."""
    return TO_TRANSFORMERS_WITH_NORM if config.head_norm_affine else TO_TRANSFORMERS


def refuse(config: DiffLlamaConfig, who: str, **required: object) -> None:
    """Raise `ValueError` with each field whose value the target format cannot express."""
    faults = [
        f"`{field}` must be {reprlib.repr(value)}, got {reprlib.repr(getattr(config, field))}"
        for field, value in required.items()
        if getattr(config, field) != value
    ]
    if faults:
        raise ValueError(f"This model cannot be converted to {who}: {'; '.join(faults)}.")
