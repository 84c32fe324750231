# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
# From diffllama 0.1.0, commit e3c0a870fb088a09e51aad82d9588b9bac1c6474.
"""Configuration of differential Llama models."""

import copy
import functools
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from transformers import __version__
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters


HEADS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
AUTO_MAP = {
    "AutoConfig": "configuration_diffllama.DifferentialLlamaConfig",
    "AutoModel": "modeling_diffllama.DifferentialLlamaModel",
    **{f"AutoModel{head}": f"modeling_diffllama.DifferentialLlama{head}" for head in HEADS},
}
"""Auto class -> the class that it loads, as `file.Class` in a Hub folder."""

SUMS_OWN_GRADIENTS = tuple(map(int, __version__.split(".")[:2])) >= (5, 23)  # older ones: also submodules' gradients
LAYER_TYPES = ("full_attention", "sliding_attention")

BOUNDS: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**24),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**14),
    **dict.fromkeys(("num_noise_heads", "num_key_value_heads"), (1, 2**13)),
    **dict.fromkeys(("hidden_size", "head_dim"), (1, 2**17)),
    "max_position_embeddings": (1, 2**31 - 1),
    "num_labels": (1, 2**20),
    "initializer_range": (0.0, 1.0),
    # 0 would divide the padding token's embedding by its norm, 0
    **dict.fromkeys(("rms_norm_eps", "head_norm_eps"), (1e-30, 1.0)),
}
"""Field -> its least and greatest value. The greatest are far beyond published models."""

ROPE_BOUNDS: dict[str, tuple[float, float]] = {
    "rope_theta": (2.0, 1e12),
    "original_max_position_embeddings": (2, 2**31 - 1),
    "attention_factor": (0.01, 100.0),
    **dict.fromkeys(("factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"), (1e-3, 1e6)),
    **dict.fromkeys(("beta_fast", "beta_slow"), (0.0, 1e6)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (0.0, 100.0)),
}
"""Entry of `rope_parameters` -> the least and greatest value of its number, or of each number of a list."""

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_chunk_size": ((None,), "give a `sliding_window` instead"),
    "is_causal": ((True,), "a token sees itself and earlier tokens"),
    "is_encoder_decoder": ((False, None), "this is a decoder"),
    "original_max_position_embeddings": ((None,), "it belongs in `rope_parameters`"),
    "per_layer_config": ((None,), "all layers have the same sizes"),
    "return_dict": ((True,), "for tuples, pass `return_dict=False` to `forward`"),
    "transformers_weights": ((None,), "weights are in model.safetensors, or in the files that its index names"),
    **dict.fromkeys(("decoder", "generator", "text_config", "text_encoder"), ((None,), "the model has no submodels")),
}
"""Field that transformers reads in any configuration -> the values supported here, and the reason or the remedy."""


def refuse(name: str, value: Any, rule: str) -> NoReturn:
    """Raise the error that names a field, its rule and its value. A long value is abbreviated."""
    raise StrictDataclassFieldValidationError(name, ValueError(f"`{name}` {rule}, got {reprlib.repr(value)}."))


def check_bounds(name: str, value: Any, bounds: tuple[float, float]) -> None:
    """Refuse a value that is not a number within bounds, or not an integer where the bounds are integers."""
    low, high = bounds
    kind, noun = (int, "an integer") if isinstance(low, int) else (int | float, "a number")
    if not isinstance(value, kind) or not low <= value <= high:
        refuse(name, value, f"must be {noun} from {low} to {high}")


def cut_messages(cls: type) -> type:
    """Shorten messages about wrong types. They contain the whole value, and a config.json may have megabytes."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def init_or_refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except StrictDataclassError as error:
            if len(message := str(error)) > 2000:
                error.args = (f"{message[:1000]} ... {message[-500:]}",)
            raise

    cls.__init__ = init_or_refuse  # type: ignore[misc]
    return cls


@cut_messages
@strict
class DifferentialLlamaConfig(PreTrainedConfig):
    r"""
    Configuration of a Llama with differential attention.

    A differential head computes `(softmax(Q1 K1ᵀ/√d) - λ softmax(Q2 K2ᵀ/√d)) V`, a signal map minus λ times a noise
    map. The paper (arXiv 2410.05258, section 2) counts `h` heads of width `d` with values of width `D = 2d`. In grouped
    differential attention (arXiv 2510.06949), r signal maps share one noise map; the paper has r = 1. Head counts here
    describe the single attention call that computes all maps of a layer, so that engines size KV caches correctly:

    | field                 | value                                      | the paper's 3B (h = 12, d = 128) |
    | --------------------- | ------------------------------------------ | -------------------------------- |
    | `num_attention_heads` | H = h + h/r, number of softmax maps        | 24                               |
    | `num_noise_heads`     | h/r, number of noise maps                  | 12                               |
    | `num_key_value_heads` | number of key/value heads of width D       | 12                               |
    | `head_dim`            | D, width of keys and values                | 256                              |

    Fields that are not listed have the same meaning as in `LlamaConfig`.

    Args:
        num_attention_heads (`int`, defaults to 32): Number of softmax maps: two or more times `num_noise_heads`.
        num_noise_heads (`int`, *optional*, defaults to `num_attention_heads // 2`): Number of noise maps: a multiple of
            `num_key_value_heads`, because the maps of a group share one key/value head.
        num_key_value_heads (`int`, *optional*, defaults to `num_noise_heads`): Number of key/value heads.
        head_dim (`int`, *optional*, defaults to `hidden_size` / h): D. V1 splits each key into two of width d = D/2.
        diff_variant (`"v1"` or `"v2"`, defaults to `"v1"`): `"v1"` is the paper: one λ per layer from four learned
            vectors, and RMSNorm over each head, times (1 - λ_init). `"v2"` is microsoft/unilm's second version: one λ
            per token and head, the sigmoid of a projection; queries and keys of width D; no head norm.
        lambda_init (`"exponential"`, a `float` in (0, 1) or a list, defaults to `"exponential"`): λ_init, V1 only.
            `"exponential"` is 0.8 - 0.6·exp(-0.3·l) for layer l = 0, 1, …; a number applies to all layers (ablation);
            a list has a finite number for each layer.
        lambda_std_dev (`float`, defaults to 0.1): Standard deviation of the four λ vectors at initialization, V1 only.
            Its square is at most 14/√d, so that λ is finite in float32.
        head_norm (`bool`, defaults to `True`): Whether to normalize the output of each head, V1 only. `False` (the
            paper's ablation) also drops the factor (1 - λ_init), which scales the norm's output.
        head_norm_affine (`bool`, defaults to `True`): Whether the head norm has a learned weight.
        head_norm_eps (`float`, defaults to 1e-5): ε of the head norm. Other norms have `rms_norm_eps` (1e-6).
        hidden_act (`str`, defaults to `"silu"`): An activation of transformers, or `"poly_norm"` (arXiv 2411.03884).
        gated_mlp (`bool`, defaults to `True`): Whether the feed-forward has a gate, as in Llama.
        rope_parameters (`dict`, *optional*): Rotary embedding of width `rotary_dim`: `rope_type` (`"default"`,
            `"linear"`, `"dynamic"`, `"yarn"`, `"longrope"`, `"llama3"`, …), `rope_theta` and the type's parameters.
        attention_out_bias (`bool`, *optional*, defaults to `attention_bias`): Whether the output projection has a bias.
        attention_dropout (`float`, defaults to 0.0): Dropout probability of each softmax map in training.
        use_qk_norm (`bool`, defaults to `False`): Whether to apply RMSNorm to each map's queries and keys before the
            rotation, with `rms_norm_eps` and one weight per layer for queries and one for keys.
        no_rope_layers (`list[int]`, *optional*): For each layer, 1 if it rotates queries and keys, 0 if not. By default
            all layers do.
        sliding_window (`int`, *optional*): Number of tokens, including itself, that a token sees in the layers of type
            `"sliding_attention"`. At least 2.
        layer_types (`list[str]`, *optional*): For each layer, `"full_attention"` or `"sliding_attention"`. By default
            all layers are `"sliding_attention"` if `sliding_window` is set, otherwise `"full_attention"`.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: a field is invalid. The message names the field, value and rule.
    """

    model_type = "diff_llama"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.lambda_proj": "colwise",  # V2: its outputs are heads
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        # Weights shared by all heads: norms, V1's λ. Last, because vLLM takes the first name that is a module's prefix
    } | {f"layers.*.self_attn{x}": "replicated_with_grad_allreduce" for x in (".q_norm", ".k_norm", ".head_norm", "")}
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
    num_noise_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    diff_variant: Literal["v1", "v2"] = "v1"
    lambda_init: str | float | list[float] = "exponential"
    lambda_std_dev: int | float = 0.1
    head_norm: bool = True
    head_norm_affine: bool = True
    head_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    gated_mlp: bool = True
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
    # fields of transformers, which does not check their types
    output_hidden_states: bool | None = False
    id2label: dict | None = None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_inherited_fields(vars(self) | kwargs)
        if self.num_noise_heads is None:
            self.num_noise_heads = max(self.num_attention_heads // 2, 1)  # checked in validate_architecture
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_noise_heads
        heads = max(self.num_signal_heads, 1)
        if self.head_dim is None and self.hidden_size % heads == 0:
            self.head_dim = self.hidden_size // heads
        if self.attention_out_bias is None:
            self.attention_out_bias = self.attention_bias
        if self.layer_types is None:  # `generate` and engines expect a list where the field exists
            check_bounds("num_hidden_layers", self.num_hidden_layers, BOUNDS["num_hidden_layers"])
            layer_type = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [layer_type] * self.num_hidden_layers
        # Every saved configuration names its classes, so that any folder of this model can be a Hub folder.
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        super().__post_init__(**kwargs)
        v1, plan = self.diff_variant == "v1", type(self).base_model_tp_plan  # the instance's: of its modules, not saved
        has = {"self_attn": v1 and SUMS_OWN_GRADIENTS, "lambda_proj": not v1, "gate_proj": self.gated_mlp}
        has |= {"head_norm": v1 and self.head_norm and self.head_norm_affine}
        has |= dict.fromkeys(("q_norm", "k_norm"), self.use_qk_norm)
        self.base_model_tp_plan = {k: v for k, v in plan.items() if has.get(k.rpartition(".")[2], True)}
        if self.hidden_act == "poly_norm":  # it normalizes over the whole width, which must not be split
            whole = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
            self.base_model_tp_plan |= {k: whole[v] for k, v in self.base_model_tp_plan.items() if ".mlp." in k}

    def _check_inherited_fields(self, given: Mapping[str, Any]) -> None:
        """Check fields that transformers expands, converts or reads."""
        for name, (allowed, reason) in UNSUPPORTED.items():
            if not any(given.get(name, allowed[0]) is value for value in allowed):  # torch does not accept 1 for True
                refuse(name, given[name], f"is not supported ({reason})")
        check_bounds("num_labels", given.get("num_labels", 2), BOUNDS["num_labels"])
        if self.id2label is not None and not (self.id2label and all(str(key).isdecimal() for key in self.id2label)):
            refuse("id2label", self.id2label, "must map each index, from 0 on, to a label")
        for name in ("dtype", "torch_dtype"):
            value = given.get(name)
            dtype = getattr(torch, value, None) if isinstance(value, str) else value
            if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                refuse(name, value, "must be a floating-point dtype of torch")
        for name in ("rope_parameters", "rope_scaling"):
            value = given.get(name)
            if isinstance(value, dict) and {*LAYER_TYPES, *(self.layer_types or ())} & set(value):
                refuse(name, value, "must be one dictionary for all layers, not one for each layer type")

    @property
    def num_signal_heads(self) -> int:
        """Number s of signal maps, which is the number of differential heads (the paper's h)."""
        return self.num_attention_heads - (self.num_noise_heads or 0)

    @property
    def signals_per_noise(self) -> int:
        """Number r of signal maps that share one noise map."""
        return self.num_signal_heads // (self.num_noise_heads or 1)

    @property
    def rotary_dim(self) -> int:
        """Width of rotated queries and keys: d = D/2 in V1, whose two maps have their own keys, and D in V2."""
        assert self.head_dim is not None  # set in __post_init__
        return self.head_dim // 2 if self.diff_variant == "v1" else self.head_dim

    def rotary_config(self) -> "DifferentialLlamaConfig":
        """Copy the configuration with `head_dim` = `rotary_dim`, for transformers' code that rotates by `head_dim`."""
        config = copy.deepcopy(self)
        config.head_dim = self.rotary_dim
        return config

    def validate_rope(self) -> None:
        """Check `rope_parameters`, also against the rotated width `rotary_dim`."""
        lists = ("short_factor", "long_factor")
        given = (self.rope_parameters or {}).items()
        rope = {name: value for name, value in given if value is not None or name in lists}
        rope_type = rope.get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            rule = f"must be 'default' or one of {', '.join(ROPE_INIT_FUNCTIONS)}"
            refuse("rope_parameters['rope_type']", rope_type, rule)
        partial = rope.get("partial_rotary_factor", 1.0)
        if partial != 1.0:
            refuse("rope_parameters['partial_rotary_factor']", partial, "must be 1.0 (the whole width is rotated)")
        for name, bounds in ROPE_BOUNDS.items():
            if name not in rope and name != "rope_theta":
                continue
            field, numbers = f"rope_parameters['{name}']", rope.get(name)
            if name not in lists:
                numbers = [numbers]
            elif not isinstance(numbers, list) or len(numbers) != self.rotary_dim // 2:
                count = len(numbers) if isinstance(numbers, list) else 0
                rule = f"must have {self.rotary_dim // 2} numbers, half of the rotated width {self.rotary_dim}"
                refuse(field, numbers, f"{rule}, not {count}")
            for number in numbers:
                check_bounds(field, number, bounds)
        if rope_type == "dynamic" and self.rotary_dim < 4:
            refuse("head_dim", self.head_dim, "must give each map 4 or more dimensions for rope_type='dynamic'")
        low, high = rope.get("low_freq_factor", 0), rope.get("high_freq_factor", float("inf"))
        if rope_type == "llama3" and low >= high:
            refuse("rope_parameters['high_freq_factor']", high, f"must be greater than 'low_freq_factor' ({low})")
        config = self.rotary_config()
        config.rope_parameters = rope
        try:
            super(DifferentialLlamaConfig, config).validate_rope()
        except KeyError as error:
            raise ValueError(f"`rope_parameters`: {error.args[0]}") from error

    def validate_architecture(self) -> None:
        """Check the fields against each other."""
        self._check_inherited_fields(vars(self))
        if self.head_dim is None:
            rule = f"`hidden_size` ({self.hidden_size}) is not a multiple of the {self.num_signal_heads} signal heads"
            refuse("head_dim", None, f"must be set because {rule}")
        for name, bounds in BOUNDS.items():
            check_bounds(name, 1 if name == "num_labels" else getattr(self, name), bounds)
        noise, keys = self.num_noise_heads or 1, self.num_key_value_heads or 1
        if self.num_attention_heads % noise or self.num_attention_heads == noise:
            rule = f"must be two or more times `num_noise_heads` ({noise}), whose default is half of it"
            refuse("num_attention_heads", self.num_attention_heads, rule)
        if noise % keys:
            rule = f"must divide `num_noise_heads` ({noise} of `num_attention_heads`={self.num_attention_heads})"
            refuse("num_key_value_heads", keys, rule)
        multiple, why = (4, "two keys, each rotated in pairs") if self.diff_variant == "v1" else (2, "rotated in pairs")
        if self.head_dim % multiple:
            rule = f"must be a multiple of {multiple} for diff_variant={self.diff_variant!r} ({why})"
            refuse("head_dim", self.head_dim, rule)
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            refuse("pad_token_id", self.pad_token_id, f"must be less than `vocab_size` ({self.vocab_size})")
        for name in ("bos_token_id", "eos_token_id"):
            ids = getattr(self, name)
            for token_id in ids if isinstance(ids, list) else [-1 if ids is None else ids]:
                check_bounds(name, token_id, (-1, 2**31 - 1))  # -1 means none in some files
        given = self.lambda_init
        for number in given if isinstance(given, list) else ():
            check_bounds("lambda_init", number, (-100.0, 100.0))
        if not (isinstance(given, list) or given == "exponential" or (isinstance(given, float) and 0.0 < given < 1.0)):
            refuse("lambda_init", given, "must be 'exponential', a float in (0, 1) or a list of a float for each layer")
        # λq·λk has the standard deviation lambda_std_dev² √d; six of them must be below 88, where exp overflows
        check_bounds("lambda_std_dev", self.lambda_std_dev, (0.0, (14 / self.rotary_dim**0.5) ** 0.5))
        if self.hidden_act not in (*ACT2FN, "poly_norm"):
            refuse("hidden_act", self.hidden_act, f"must be one of poly_norm, {', '.join(ACT2FN)}")
        for name in ("attention_dropout", "classifier_dropout"):
            dropout = getattr(self, name, None)
            if dropout is not None and not (isinstance(dropout, int | float) and 0.0 <= dropout < 1.0):
                refuse(name, dropout, "must be a number in [0, 1)")

    def validate_layer_type(self) -> None:
        """Check the fields that have an entry for each layer, and `sliding_window`."""
        for name, values in (("layer_types", LAYER_TYPES), ("no_rope_layers", (0, 1)), ("lambda_init", None)):
            entries = getattr(self, name)
            if not isinstance(entries, list):
                continue
            if len(entries) != self.num_hidden_layers:
                rule = f"must have an entry for each of the `num_hidden_layers` ({self.num_hidden_layers}) layers"
                refuse(name, entries, f"{rule}, not {len(entries)}")
            if values is not None and not set(entries) <= set(values):
                refuse(name, entries, f"must contain only {values[0]!r} and {values[1]!r}")
        if self.sliding_window is None and "sliding_attention" in (self.layer_types or ()):
            refuse("layer_types", self.layer_types, "must all be 'full_attention' if `sliding_window` is None")
        if self.sliding_window is not None:
            check_bounds("sliding_window", self.sliding_window, (2, 2**31 - 1))  # the token and the one before it


# Auto classes look up models by this class's *name*: with `DiffLlamaConfig` they would find transformers' own model.
DiffLlamaConfig = DifferentialLlamaConfig
