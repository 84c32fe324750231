# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration of differential Llama models."""

import copy
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters


AUTO_MAP = {
    "AutoConfig": "configuration_diffllama.DifferentialLlamaConfig",
    "AutoModel": "modeling_diffllama.DifferentialLlamaModel",
    "AutoModelForCausalLM": "modeling_diffllama.DifferentialLlamaForCausalLM",
    "AutoModelForSequenceClassification": "modeling_diffllama.DifferentialLlamaForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_diffllama.DifferentialLlamaForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_diffllama.DifferentialLlamaForQuestionAnswering",
}
"""Auto class -> the class that it loads, as `file.Class` in a Hub folder."""


@strict
class DifferentialLlamaConfig(PreTrainedConfig):
    r"""
    Configuration of a Llama whose attention is differential.

    A differential head computes `(softmax(Q1 K1ᵀ/√d) - λ softmax(Q2 K2ᵀ/√d)) V`. The three fields from which engines
    size caches and kernels describe the one attention call that computes every head of a layer. In the paper's words
    (arXiv 2410.05258, section 2) a layer has `h` heads of width `d`, and values are `D = 2d` wide:

    | field                 | value                        | 3B model of the paper (h = 12, d = 128) |
    | --------------------- | ---------------------------- | --------------------------------------- |
    | `num_attention_heads` | H = 2h, the softmax maps     | 24                                      |
    | `num_key_value_heads` | key/value heads of width D   | 12                                      |
    | `head_dim`            | D, width of keys and values  | 256                                     |

    Args:
        vocab_size (`int`, defaults to 32000):
            Number of tokens.
        hidden_size (`int`, defaults to 4096):
            Width of the hidden states.
        intermediate_size (`int`, defaults to 11008):
            Width of the feed-forward layers.
        num_hidden_layers (`int`, defaults to 32):
            Number of decoder layers.
        num_attention_heads (`int`, defaults to 32):
            Number of softmax maps H, two for each differential head. Even.
        num_key_value_heads (`int`, *optional*, defaults to `num_attention_heads // 2`):
            Number of key/value heads. Divides the number of differential heads, `num_attention_heads // 2`.
        head_dim (`int`, *optional*, defaults to `hidden_size // (num_attention_heads // 2)`):
            Width D of keys and values. V1 splits a key into two of width d = D/2; V2 does not split.
        diff_variant (`"v1"` or `"v2"`, defaults to `"v1"`):
            `"v1"`: the paper. λ per layer from four learned vectors, RMSNorm over each head, times (1 - λ_init).
            `"v2"`: microsoft/unilm's second version. λ = sigmoid of a projection, per token and head; two queries of
            width D for each head on ordinary keys; no head norm.
        lambda_init (`"exponential"` or a `float` in (0, 1), defaults to `"exponential"`):
            λ_init, V1 only. `"exponential"` is 0.8 - 0.6·exp(-0.3·l) for layer l = 0, 1, …; a number is used in all
            layers (the paper's ablation).
        lambda_std_dev (`float`, defaults to 0.1):
            Standard deviation with which the four λ vectors are initialised, V1 only.
        head_norm (`bool`, defaults to `True`):
            Whether heads are normalised, V1 only. `False` is the paper's ablation; it also drops the factor
            (1 - λ_init), which is the scale of that norm.
        head_norm_affine (`bool`, defaults to `True`):
            Whether the head norm has a learned weight.
        hidden_act (`str`, defaults to `"silu"`):
            Activation of the feed-forward layers.
        max_position_embeddings (`int`, defaults to 2048):
            Longest sequence the model is meant for.
        initializer_range (`float`, defaults to 0.02):
            Standard deviation with which matrices are initialised.
        rms_norm_eps (`float`, defaults to 1e-6):
            ε of the layers' RMSNorm. The head norm's is 1e-5, as published.
        use_cache (`bool`, defaults to `True`):
            Whether keys and values are returned for generation.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*):
            Special tokens; `eos_token_id` may be a list.
        tie_word_embeddings (`bool`, defaults to `False`):
            Whether the output layer is the embedding.
        rope_parameters (`dict`, *optional*):
            Rotary embedding: `rope_type` (`"default"`, `"linear"`, `"dynamic"`, `"yarn"`, `"longrope"`, `"llama3"`, …),
            `rope_theta` and what the type needs. Applies to the width that is rotated, see `rotary_dim`.
        attention_bias (`bool`, defaults to `False`):
            Whether the query, key and value projections have biases.
        attention_out_bias (`bool`, *optional*, defaults to `attention_bias`):
            Whether the output projection has a bias.
        attention_dropout (`float`, defaults to 0.0):
            Dropout on each of the two softmax maps while training.
        mlp_bias (`bool`, defaults to `False`):
            Whether the feed-forward layers have biases.
        use_qk_norm (`bool`, defaults to `False`):
            Whether every query and key of a map is normalised before it is rotated: RMSNorm over its width (d in V1, D
            in V2) with `rms_norm_eps` and a learned weight, one for all queries and one for all keys of a layer.
        no_rope_layers (`list[int]`, *optional*):
            For each layer, 1 if it rotates queries and keys and 0 if it does not; every layer does by default.
        sliding_window (`int`, *optional*):
            How many tokens, itself among them, a token sees in the layers that `layer_types` names
            `"sliding_attention"`. At least 2.
        layer_types (`list[str]`, *optional*):
            For each layer, `"full_attention"` or `"sliding_attention"`. By default every layer slides if there is a
            `sliding_window`, and none if there is not.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: a field has the wrong type or value, or fields contradict each
            other. The message names the field, the value received and the rule.
    """

    model_type = "diff_llama"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",  # one weight for all heads
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.lambda_proj": "colwise",  # V2: its outputs are heads
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    diff_variant: Literal["v1", "v2"] = "v1"
    lambda_init: str | float = "exponential"
    lambda_std_dev: int | float = 0.1
    head_norm: bool = True
    head_norm_affine: bool = True
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    attention_out_bias: bool | None = None
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    use_qk_norm: bool = False
    no_rope_layers: list[int] | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        heads = max(self.num_attention_heads // 2, 1)  # the rule for wrong counts is in validate_architecture
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if self.head_dim is None and self.hidden_size % heads == 0:
            self.head_dim = self.hidden_size // heads
        if self.attention_out_bias is None:
            self.attention_out_bias = self.attention_bias
        if self.layer_types is None:  # `generate` and engines read a list where there is such a field
            layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [layer_type] * self.num_hidden_layers
        # Every saved configuration says where its classes are, so that any folder of this model can be a Hub folder.
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        super().__post_init__(**kwargs)

    @property
    def rotary_dim(self) -> int:
        """Width of the vectors that are rotated: d = D/2 in V1 (each map has its own query and key), D in V2."""
        assert self.head_dim is not None  # set in __post_init__
        return self.head_dim // 2 if self.diff_variant == "v1" else self.head_dim

    def rotary_config(self) -> "DifferentialLlamaConfig":
        """A copy whose `head_dim` is `rotary_dim`, for code of transformers that rotates `head_dim`."""
        config = copy.deepcopy(self)
        config.head_dim = self.rotary_dim
        return config

    def validate_rope(self) -> None:
        """Checks `rope_parameters` against the width that is rotated."""
        rope = self.rope_parameters or {}
        rope_type = rope.get("rope_type", "default")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(
                f"`rope_parameters['rope_type']` must be 'default' or one of {', '.join(ROPE_INIT_FUNCTIONS)}, got "
                f"{rope_type!r}."
            )
        if not rope.get("rope_theta", 1.0) > 0:
            raise ValueError(f"`rope_parameters['rope_theta']` must be positive, got {rope['rope_theta']}.")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"`rope_parameters['partial_rotary_factor']` must be 1.0 (whole vectors are rotated), got "
                f"{rope['partial_rotary_factor']}."
            )
        for name in ("short_factor", "long_factor"):
            if name not in rope:
                continue
            factors = rope[name]
            if not isinstance(factors, list) or len(factors) != self.rotary_dim // 2:
                raise ValueError(
                    f"`rope_parameters['{name}']` must have {self.rotary_dim // 2} numbers, half of the rotated width "
                    f"{self.rotary_dim} (`head_dim`={self.head_dim}, `diff_variant`={self.diff_variant!r}), got "
                    f"{len(factors) if isinstance(factors, list) else factors}."
                )
        try:
            super(DifferentialLlamaConfig, self.rotary_config()).validate_rope()
        except (KeyError, ZeroDivisionError) as error:
            raise ValueError(f"`rope_parameters`: {error.args[0]}") from error

    def validate_architecture(self) -> None:
        """Checks the fields against each other. Raises `ValueError` with the field, its value and the rule."""
        assert self.num_key_value_heads is not None  # set in __post_init__
        if self.head_dim is None:
            heads = max(self.num_attention_heads // 2, 1)
            raise ValueError(
                f"`head_dim` is not given and `hidden_size` ({self.hidden_size}) is not a multiple of the number "
                f"of differential heads ({heads} = num_attention_heads // 2): give `head_dim`."
            )
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.num_attention_heads % 2:
            raise ValueError(
                f"`num_attention_heads` must be even (two softmax maps for each differential head), got "
                f"{self.num_attention_heads}."
            )
        heads = self.num_attention_heads // 2
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` must divide the number of differential heads ({heads} = num_attention_heads // "
                f"2), so that both maps of a head share a key, got {self.num_key_value_heads}."
            )
        multiple, why = (4, "two keys, each rotated in pairs") if self.diff_variant == "v1" else (2, "rotated in pairs")
        if self.head_dim % multiple:
            raise ValueError(
                f"`head_dim` must be a multiple of {multiple} for diff_variant={self.diff_variant!r} ({why}), got "
                f"{self.head_dim}."
            )
        if self.lambda_init != "exponential" and not (
            isinstance(self.lambda_init, float) and 0.0 < self.lambda_init < 1.0
        ):
            raise ValueError(f"`lambda_init` must be 'exponential' or a float in (0, 1), got {self.lambda_init!r}.")
        for name in ("lambda_std_dev", "initializer_range", "rms_norm_eps"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"`{name}` must be finite and not negative, got {getattr(self, name)}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of {', '.join(ACT2FN)}, got {self.hidden_act!r}.")
        if not 0.0 <= (self.attention_dropout or 0.0) < 1.0:
            raise ValueError(f"`attention_dropout` must be in [0, 1), got {self.attention_dropout}.")
        if getattr(self, "attention_chunk_size", None) is not None:
            raise ValueError(
                f"`attention_chunk_size` is not supported, got {self.attention_chunk_size}. Leave it out, or give a "
                "`sliding_window`."
            )

    def validate_layer_type(self) -> None:
        """Checks the fields that have an entry for each layer, and the window of those that slide."""
        for name, values in (("layer_types", ("full_attention", "sliding_attention")), ("no_rope_layers", (0, 1))):
            entries = getattr(self, name)
            if entries is None:
                continue
            if len(entries) != self.num_hidden_layers:
                raise ValueError(
                    f"`{name}` must have an entry for each of the `num_hidden_layers` ({self.num_hidden_layers}) "
                    f"layers, got {len(entries)}: {entries}."
                )
            if not set(entries) <= set(values):
                raise ValueError(f"`{name}` must hold {values[0]!r} and {values[1]!r} only, got {entries}.")
        slides = "sliding_attention" in (self.layer_types or ())
        if self.sliding_window is None and slides:
            raise ValueError(
                f"`layer_types` must all be 'full_attention' where `sliding_window` is None, got {self.layer_types}."
            )
        if self.sliding_window is not None and self.sliding_window < 2:
            raise ValueError(
                "`sliding_window` must be at least 2 (a token itself and one before it) or None, got "
                f"{self.sliding_window}."
            )


# transformers' Auto classes look models up by the *name* of the configuration's class, and transformers has a
# `DiffLlamaConfig` for an architecture of its own: under that name they would build its models from this configuration.
DiffLlamaConfig = DifferentialLlamaConfig

__all__ = ["DiffLlamaConfig", "DifferentialLlamaConfig"]
