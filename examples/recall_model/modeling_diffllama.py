# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
# From diffllama 0.1.0, commit e3c0a870fb088a09e51aad82d9588b9bac1c6474.
"""Llama with differential attention (arXiv 2410.05258). Letters in shapes: see differential_attention.py."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv
from transformers.utils import can_return_tuple
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_diffllama import AUTO_MAP, DiffLlamaConfig
from .differential_attention import (
    DiffLlamaPolyNorm,
    DiffLlamaRMSNorm,
    at_least_float32,
    combine_maps,
    differential_maps,
    exponential_lambda_init,
    join_keys,
    pad_queries,
    vector_lambda,
)


DIFF_ATTENTION = "diff_attention"  # registered by the package diffllama; it subtracts the two maps itself
ACT2FN["poly_norm"] = DiffLlamaPolyNorm  # read by LlamaMLP
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")  # of V1, each [d]
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to scores: the lowest number of `dtype` where a boolean mask is false; else clamps."""
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    return mask.clamp(min=lowest)


def check_attention_mask(mask: Any, b: int, n: int, cache: Cache | None) -> None:
    """Raise `ValueError` for a mask that transformers would misread: four-dimensional integers, or a shape other than
    [b, tokens]: those in `cache` (or the size of a static cache) and n new ones."""
    shape, dtype = tuple(mask.shape), getattr(mask, "dtype", None)  # flex_attention's own masks have no dtype
    if len(shape) == 4:
        if dtype is not None and dtype != torch.bool and not dtype.is_floating_point:
            rule = "must be boolean (true where a query sees a key) or floating point (added to the scores)"
            raise ValueError(f"`attention_mask` of four dimensions {rule}, got {dtype}.")
        return
    past = 0 if cache is None else cache.get_seq_length()
    if (isinstance(past, torch.Tensor) and torch.compiler.is_compiling()) or shape == (b, past + n):
        return  # compiled code cannot read the length of a static cache
    if cache is None or shape != (b, max(sum(cache.get_mask_sizes(n, i)) for i in range(max(1, len(cache.layers))))):
        raise ValueError(
            f"`attention_mask` must be [{b}, {int(past) + n}], with a 1 for each of the {int(past)} tokens in the "
            f"cache and the {n} new ones and a 0 for padding, got {list(shape)}."
        )


def bidirectional(layer_type: str, config: DiffLlamaConfig, n: int, cache: Cache | None) -> Callable[..., torch.Tensor]:
    """Return the mask function of a non-causal layer: all tokens in its window, not a static cache's free slots."""
    window = config.sliding_window if layer_type == "sliding_attention" else math.inf
    total = math.inf if cache is None else cache.get_seq_length() + n
    return lambda batch, head, query, key: ((query - key).abs() < window) & (key < total)


def check_packing(position_ids: torch.Tensor, b: int, cache: Cache | None, flash: bool) -> None:
    """Raise `ValueError` for packed sequences that follow tokens in `cache`, or with flash attention in many rows."""
    if cache is None and (b == 1 or not flash):
        return
    if position_ids.shape[-1] > 1 and not torch.compiler.is_compiling() and (position_ids.diff() <= 0).any():
        rule = f"flash attention needs one row, got {b}" if cache is None else "they need an empty `DynamicCache`"
        raise ValueError(f"`position_ids` restart within a row, which means packed sequences: {rule}.")


def eager_attention_forward(
    module: "DiffLlamaAttention",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    differential_lambda: torch.Tensor,
    output_attentions: bool | None = None,
    output_softmax_maps: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention in plain PyTorch, with maps and their differences in float32 (float64 in a float64 model).

    Args:
        query: [b, H, n, D]. `key` and `value` are [b, num_key_value_heads, m, D].
        attention_mask: added to the scores, or boolean, true where a query sees a key; broadcast to [b, H, n, m].
        differential_lambda: λ, [1] or [b, n, s, 1].

    Returns:
        The output [b, n, s, D]. With `output_attentions` also the maps after dropout: signed [b, s, n, m] in the
        queries' dtype or, with `output_softmax_maps`, softmax [b, H, n, m] in float32 (or float64); else `None`.
    """
    scores = torch.matmul(query, repeat_kv(key, module.num_key_value_groups).transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + additive_mask(attention_mask, query.dtype)
    softmax_maps = nn.functional.softmax(scores, dim=-1, dtype=at_least_float32(query.dtype))
    softmax_maps = nn.functional.dropout(softmax_maps, p=dropout, training=module.training)
    maps = differential_maps(softmax_maps, differential_lambda, module.signals_per_noise).to(query.dtype)
    output = torch.matmul(maps, repeat_kv(value, maps.shape[1] // value.shape[1])).transpose(1, 2).contiguous()
    if not (module.config.output_attentions if output_attentions is None else output_attentions):
        return output, None
    return output, softmax_maps if output_softmax_maps else maps


class DiffLlamaAttention(nn.Module):
    """Differential attention, V1 or V2, as one call of the configured attention function: ordinary grouped-query
    attention with H query heads and `num_key_value_heads` key/value heads of width D, which every implementation, cache
    and engine supports. Head counts come from tensors: with tensor parallelism a process has fewer than the config.
    """

    def __init__(self, config: DiffLlamaConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.num_key_value_heads is not None  # set when the configuration is made
        assert config.head_dim is not None
        assert config.layer_types is not None
        self.config = config
        self.layer_idx = layer_idx
        self.diff_variant = config.diff_variant
        self.head_dim = config.head_dim
        self.map_dim = config.rotary_dim  # d in V1, D in V2: width of one map's query and key
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.signals_per_noise = config.signals_per_noise
        self.scaling = self.map_dim**-0.5
        self.attention_dropout = config.attention_dropout or 0.0
        self.is_causal = True
        self.paged_implementation: str | None = None  # set by `init_continuous_batching`
        self.use_qk_norm = config.use_qk_norm
        self.use_rope = config.no_rope_layers is None or config.no_rope_layers[layer_idx] == 1
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

        hidden_size, key_value_size = config.hidden_size, config.num_key_value_heads * self.head_dim
        output_size = config.num_signal_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, config.num_attention_heads * self.map_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden_size, key_value_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden_size, key_value_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(output_size, hidden_size, bias=bool(config.attention_out_bias))
        if self.use_qk_norm:
            self.q_norm = DiffLlamaRMSNorm(self.map_dim, config.rms_norm_eps)
            self.k_norm = DiffLlamaRMSNorm(self.map_dim, config.rms_norm_eps)

        self.head_norm = None
        if self.diff_variant == "v1":
            given = config.lambda_init[layer_idx] if isinstance(config.lambda_init, list) else config.lambda_init
            self.lambda_init = exponential_lambda_init(layer_idx) if isinstance(given, str) else given
            for name in LAMBDA_VECTORS:
                self.register_parameter(name, nn.Parameter(torch.empty(self.map_dim)))
            if config.head_norm:
                self.head_norm = DiffLlamaRMSNorm(self.head_dim, config.head_norm_eps, config.head_norm_affine)
        else:
            self.lambda_proj = nn.Linear(hidden_size, config.num_signal_heads, bias=False)

    def differential_lambda(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute λ in float32 (float64 in a float64 model): V1 [1]; V2 [b, n, s, 1], from the layer's normed input."""
        if self.diff_variant == "v1":
            return vector_lambda(self.lambda_init, *(getattr(self, name) for name in LAMBDA_VECTORS))
        # Engines fuse the three projections that read `hidden_states` directly; the index excludes this one.
        logits = self.lambda_proj(hidden_states[...])
        return torch.sigmoid(logits.to(at_least_float32(logits.dtype))).unsqueeze(-1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention of [b, n, hidden_size]: the same shape, and `eager_attention_forward`'s maps or `None`.

        `position_embeddings` are cosines and sines, each [b, n, `config.rotary_dim`]. `attention_mask` is the mask of
        this layer's type, see `MASKS`.
        """
        input_shape = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(*input_shape, -1, self.map_dim)
        if query.shape[-2] % (self.signals_per_noise + 1):
            noise = self.config.num_noise_heads
            raise ValueError(f"`num_noise_heads` must be a multiple of the tensor-parallel size, got {noise}.")
        key = self.k_proj(hidden_states).view(*input_shape, -1, self.map_dim)
        value = self.v_proj(hidden_states).view(*input_shape, -1, self.head_dim)
        differential_lambda = self.differential_lambda(hidden_states)

        if self.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.use_rope:
            cos, sin = position_embeddings
            query, key = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
        if self.diff_variant == "v1":
            query, key = pad_queries(query, self.signals_per_noise), join_keys(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        if kwargs.get("is_causal") is None:
            kwargs["is_causal"] = self.is_causal
        dropout = self.attention_dropout if self.training else 0.0
        implementation = self.config._attn_implementation
        if self.paged_implementation is not None and kwargs.get("cache") is not None:
            implementation = self.paged_implementation
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        kwargs |= {"sliding_window": self.sliding_window, "differential_lambda": differential_lambda}
        attn_output, attn_weights = attention_interface(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )

        attn_output = attn_output.reshape(*input_shape, -1, self.head_dim)
        if attn_output.shape[-2] == query.shape[1]:  # every map's output, [b, n, H, D]
            attn_output = combine_maps(attn_output, differential_lambda, self.signals_per_noise)  # [b, n, s, D]
        if self.head_norm is not None:
            attn_output = self.head_norm(attn_output) * (1 - self.lambda_init)
        return self.o_proj(attn_output.flatten(-2)), attn_weights


class DiffLlamaMLP(LlamaMLP):
    """Llama's feed-forward, down(act(gate(x))·up(x)), for PolyNorm, or without a gate, down(act(up(x)))."""

    def __init__(self, config: DiffLlamaConfig) -> None:
        super().__init__(config)
        if not config.gated_mlp:
            del self.gate_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the feed-forward of [..., hidden_size]. Keeps the shape."""
        if not self.config.gated_mlp:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        # But for the index engines would fuse the two projections, and split the width that PolyNorm takes means of
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x[...]))


class DiffLlamaDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm decoder layer: differential attention, then the feed-forward."""

    def __init__(self, config: DiffLlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DiffLlamaAttention(config, layer_idx)
        self.mlp = (LlamaMLP if config.gated_mlp and config.hidden_act != "poly_norm" else DiffLlamaMLP)(config)
        self.input_layernorm = DiffLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DiffLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Compute the layer of [b, n, hidden_size]. Keeps the shape; `kwargs` are `DiffLlamaAttention`'s."""
        attn_output, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attn_output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DifferentialLlamaPreTrainedModel(PreTrainedModel):
    """Base class of all differential Llama models: initialization and supported features."""

    config_class = DiffLlamaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DiffLlamaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": DiffLlamaDecoderLayer, "attentions": DiffLlamaAttention}

    def __init__(self, config: DiffLlamaConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # The generic heads build their base model with AutoModel, which would ask again whether to trust remote code
        modeling_auto.AutoModel.register(type(config), DifferentialLlamaModel, exist_ok=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the class name in checkpoints under FSDP2, which gives a sharded model a subclass made by torch."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch."):
            own = next(base for base in cls.__mro__ if not base.__module__.startswith("torch."))
            cls.__module__, cls.__name__, cls.__qualname__ = own.__module__, own.__name__, own.__qualname__

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the requested attention function; by default `diff_attention` for V1 if registered, else `sdpa`."""
        if requested_attention is None and self.config.diff_variant == "v1":
            requested_attention = DIFF_ATTENTION if DIFF_ATTENTION in ALL_ATTENTION_FUNCTIONS.valid_keys() else None
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DiffLlamaAttention) and module.diff_variant == "v1":
            for name in LAMBDA_VECTORS:
                init.normal_(getattr(module, name), mean=0.0, std=self.config.lambda_std_dev)
        elif type(module).__name__ == "DiffLlamaPolyNorm":  # the class may be another imported copy's
            init.constant_(module.weight, 1 / 3)
            init.zeros_(module.bias)


class DifferentialLlamaModel(DifferentialLlamaPreTrainedModel):
    """Differential Llama decoder without a head."""

    def __init__(self, config: DiffLlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DiffLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = DiffLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config.rotary_config())
        self.gradient_checkpointing = False
        self.post_init()

    def layer_masks(
        self, inputs_embeds: torch.Tensor, attention_mask: Any, position_ids: Any, cache: Cache | None, is_causal: Any
    ) -> list[Any]:
        """Return each layer's mask. Arguments and errors as in `forward`; `is_causal` overrides the layers' values."""
        (b, n, _), config = inputs_embeds.shape, self.config
        assert config.layer_types is not None  # set when the configuration is made
        kinds = [
            (kind, getattr(getattr(layer, "self_attn", None), "is_causal", True) if is_causal is None else is_causal)
            for kind, layer in zip(config.layer_types, self.layers, strict=False)
        ]
        if not all(causal for _, causal in kinds):
            config = copy.copy(config)
            config.is_causal = True  # else transformers ignores packed sequences and a static cache's free slots
        if isinstance(attention_mask, dict):  # `generate` prepares masks for compiled steps
            masks: dict[Any, Any] = {kind: attention_mask[kind[0]] for kind in kinds}
        else:
            if attention_mask is not None:
                check_attention_mask(attention_mask, b, n, cache)
            elif position_ids is not None:
                if isinstance(cache, DynamicCache) and cache.get_seq_length() == 0:
                    cache = None  # transformers detects packed sequences only without a cache
                check_packing(position_ids, b, cache, is_flash_attention_requested(config))
            masks = {
                (layer_type, causal): MASKS[layer_type](
                    config=config,
                    inputs_embeds=inputs_embeds,
                    attention_mask=attention_mask,
                    past_key_values=cache,
                    position_ids=position_ids,
                    or_mask_function=None if causal else bidirectional(layer_type, config, n, cache),
                )
                for layer_type, causal in dict.fromkeys(kinds)
            }
        for mask in masks.values() if config._attn_implementation == "flex_attention" else ():
            if isinstance(mask, torch.Tensor):  # it would add the first head; on CPUs torch 2.13 reads out of bounds
                rule = "flex_attention needs an `attention_mask` of two dimensions or a `BlockMask`, got a tensor"
                raise ValueError(f"{rule} {list(mask.shape)}. Use another attention function, such as `sdpa`.")
        return [masks[kind] for kind in kinds]

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: token ids [b, n]. Give exactly one of `input_ids` and `inputs_embeds`.
            inputs_embeds: embeddings [b, n, hidden_size].
            attention_mask: [b, n] (with a cache [b, m]), 0 for padding, which may be anywhere. Or [b, 1, n, m], boolean
                (true where a query sees a key) or added to the scores: one mask for all layers, or a `dict` with one
                for each type in `config.layer_types`.
            position_ids: [b, n]. Without mask and earlier tokens, positions that restart within a row mean packed
                sequences, which do not see each other. Do not continue from their cache: new tokens would see all.
            past_key_values: a cache of transformers. Quantized caches do not support a sliding window.
            kwargs: `output_attentions` returns each layer's signed maps A1 - λ·A2, [b, s, n, m], with gradients;
                `output_softmax_maps` makes them the softmax maps of all query heads, [b, H, n, m]. Both need
                `attn_implementation="eager"`. `output_hidden_states` returns every layer's input and the last output.
                `is_causal=False` lets tokens see later tokens (default: each layer's `self_attn.is_causal`).

        Returns:
            `last_hidden_state` [b, n, hidden_size], `past_key_values`, and the outputs requested in `kwargs`.

        Raises:
            `ValueError`: none or both of `input_ids` and `inputs_embeds` are given; `attention_mask` has a wrong shape
                or dtype; packed sequences follow earlier tokens, or are in several rows with flash attention.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        masks = self.layer_masks(inputs_embeds, attention_mask, position_ids, past_key_values, kwargs.get("is_causal"))
        if position_ids is None:
            past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_length)[None]

        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "use_cache": use_cache}
        kwargs["position_embeddings"] = self.rotary_emb(inputs_embeds, position_ids=position_ids)
        hidden_states = inputs_embeds
        for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):  # early-exit drafting lowers the count
            hidden_states = layer(hidden_states, attention_mask=masks[i], **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class DifferentialLlamaForCausalLM(DifferentialLlamaPreTrainedModel, GenerationMixin):
    """Differential Llama with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: DiffLlamaConfig) -> None:
        super().__init__(config)
        self.model = DifferentialLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return `logits` [b, n, vocab_size], `loss` if there are `labels` [b, n], and `DiffLlamaModel`'s outputs.

        `labels` are shifted here; -100 is ignored. `logits_to_keep` is the number of last tokens that get logits (0:
        all), or the tokens' indices. See `DiffLlamaModel.forward` for the other arguments.
        """
        inputs = input_ids, attention_mask, position_ids, past_key_values, inputs_embeds
        outputs = self.model(*inputs, use_cache=use_cache, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, past_key_values: Cache | None = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:  # `generate` requires `inputs_embeds` in this signature
        """Return the inputs of a step of `generate`. LongRoPE changes its frequencies when a sequence exceeds
        `original_max_position_embeddings`: that step computes the whole sequence again, without the old KV cache."""
        rope = self.config.rope_parameters
        limit = rope["original_max_position_embeddings"] if rope["rope_type"] == "longrope" else None
        if limit and past_key_values is not None and 0 < past_key_values.get_seq_length() <= limit < input_ids.shape[1]:
            past_key_values = None
            kwargs["next_sequence_length"] = None
        kwargs |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare continuous batching for `generate_batch` and servers. Raises `ValueError` for LongRoPE.

        Continuous batching rejects the name `diff_attention`: the configuration names `sdpa` while the layers compute
        `diff_attention`.
        """
        if self.config.rope_parameters["rope_type"] == "longrope":
            rule = "short prompts would get the frequencies of long ones in the batch. Use `generate`"
            raise ValueError(f"Continuous batching does not support LongRoPE: {rule}, one prompt at a time.")
        differential = self.config._attn_implementation == DIFF_ATTENTION
        if differential:
            self.set_attn_implementation("sdpa")
        manager = super().init_continuous_batching(*args, **kwargs)
        paged = differential and self.config._attn_implementation == "sdpa"  # not `paged|sdpa` of older transformers
        for module in self.modules():
            if isinstance(module, DiffLlamaAttention):
                module.paged_implementation = DIFF_ATTENTION if paged else None
        if differential:
            manager._original_attn_impl = DIFF_ATTENTION  # the manager restores it when it stops
        return manager


class DifferentialLlamaForSequenceClassification(GenericForSequenceClassification, DifferentialLlamaPreTrainedModel):
    """Differential Llama with a sequence classification head on the last token that is not padding."""


class DifferentialLlamaForTokenClassification(GenericForTokenClassification, DifferentialLlamaPreTrainedModel):
    """Differential Llama with a token classification head."""


class DifferentialLlamaForQuestionAnswering(GenericForQuestionAnswering, DifferentialLlamaPreTrainedModel):
    """Differential Llama with an extractive question answering head: the answer's first and last token."""


# Libraries look up `architectures` in transformers, where `DiffLlama…` is another architecture: hence the other names
DiffLlamaPreTrainedModel = DifferentialLlamaPreTrainedModel
DiffLlamaModel = DifferentialLlamaModel
DiffLlamaForCausalLM = DifferentialLlamaForCausalLM
DiffLlamaForSequenceClassification = DifferentialLlamaForSequenceClassification
DiffLlamaForTokenClassification = DifferentialLlamaForTokenClassification
DiffLlamaForQuestionAnswering = DifferentialLlamaForQuestionAnswering

# Trainers read these tables (whether to shift smoothed labels, a model card's task), and so do transformers' tests.
TASKS = ("", "FOR_CAUSAL_LM_", "FOR_SEQUENCE_CLASSIFICATION_", "FOR_TOKEN_CLASSIFICATION_", "FOR_QUESTION_ANSWERING_")
for task, reference in zip(TASKS, list(AUTO_MAP.values())[1:], strict=True):
    getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES")[DiffLlamaConfig.model_type] = reference.partition(".")[2]
