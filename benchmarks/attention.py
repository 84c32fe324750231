# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention only: from the rotated queries, keys and values to the input of the head norm or output projection.

For our models this is padding the queries and joining the keys (V1), calling the registered attention function and
combining the maps; for the Transformer it is the call.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from benchmarks.correctness import CHECKED_LENGTH, SAMPLES, Tensors, compare_with_plain
from benchmarks.implementations import DIFFERENTIAL, Architecture, Setting, configuration, llama
from benchmarks.measure import Step
from diffllama.modeling_diff.differential_attention import combine_maps, join_keys, pad_queries
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaAttention, eager_attention_forward


CHECKED_QUERIES = 32
"""Number of queries at which a forward is checked, including the first and the last of the sequence."""


class Attention:
    """One layer's attention with random queries, keys and values.

    Args:
        architecture: architecture of the layer.
        setting: sizes, dtype and device.
        decoding: if true, one query, and keys and values in the layout of a KV cache; otherwise as many queries as
            keys, in the layout of the projections' outputs.
    """

    def __init__(self, architecture: Architecture, setting: Setting, decoding: bool = False) -> None:
        config = configuration(architecture, llama(setting.shape, setting.groups))
        with torch.device("meta"):  # attention functions read only the module's attributes
            self.module: Any = (DiffLlamaAttention if architecture in DIFFERENTIAL else LlamaAttention)(config, 0)
        self.architecture, self.setting = architecture, setting
        self.differential, self.joins = architecture in DIFFERENTIAL, architecture == "v1"
        self.heads = config.num_signal_heads if self.differential else config.num_attention_heads
        self.decoding, self.head_dim, self.width = decoding, config.head_dim, config.head_dim // (1 + self.joins)
        b, n, keys = setting.batch, setting.length, config.num_key_value_heads
        generator = torch.Generator(setting.device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, device=setting.device)
            return values.to(setting.torch_dtype).requires_grad_(not decoding)

        rows = 1 if decoding else n
        self.query = random(b, rows, config.num_attention_heads, self.width)
        self.key = random(b, n, keys * (1 + self.joins), self.width)
        self.value = random(b, n, keys, self.head_dim)
        self.inputs = {"query": self.query, "key": self.key, "value": self.value}
        if self.differential:
            like = (1,) if self.joins else (b, rows, self.heads, 1)
            self.differential_lambda = torch.rand(like, generator=generator, device=setting.device)
            self.inputs["differential_lambda"] = self.differential_lambda.requires_grad_(not decoding)
        if decoding:
            self.cached = (join_keys(self.key) if self.joins else self.key).transpose(1, 2).contiguous()
            self.value = self.value.transpose(1, 2).contiguous().transpose(1, 2)
        self.gradient = torch.randn(b, rows, self.heads, self.head_dim, generator=generator, device=setting.device)
        self.gradient = self.gradient.to(setting.torch_dtype)

    def use(self, implementation: str) -> None:
        """Select the attention function."""
        self.module.config._attn_implementation = implementation

    def __call__(self) -> torch.Tensor:
        """Compute outputs [b, queries, heads, width of values] with the selected attention function."""
        query = pad_queries(self.query, self.module.signals_per_noise) if self.joins else self.query
        key = self.cached if self.decoding else (join_keys(self.key) if self.joins else self.key).transpose(1, 2)
        more = {"differential_lambda": self.differential_lambda} if self.differential else {}
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.module.config._attn_implementation, eager_attention_forward
        )
        output, _ = interface(
            self.module,
            query.transpose(1, 2),
            key,
            self.value.transpose(1, 2),
            None,
            dropout=0.0,
            scaling=self.width**-0.5,
            sliding_window=None,
            **more,
        )
        if output.shape[2] > self.heads:  # one output per map; fused functions return the differences
            output = combine_maps(output, self.differential_lambda, self.module.signals_per_noise)
        return output

    def plain(self, inputs: Tensors, rows: torch.Tensor) -> torch.Tensor:
        """Compute the outputs of some queries in plain PyTorch.

        Args:
            inputs: tensors of `self.inputs`, in any dtype.
            rows: indices of the queries.
        """
        query, key, value = (inputs[name].transpose(1, 2) for name in ("query", "key", "value"))
        query = query[:, :, rows]
        maps, length = query.shape[1], key.shape[2]
        if self.joins:  # each head has two maps with their own keys
            key = key.unflatten(1, (-1, 2)).repeat_interleave(maps // key.shape[1], 1).flatten(1, 2)
        else:
            key = key.repeat_interleave(maps // key.shape[1], 1)
        positions = rows + length - self.query.shape[1]
        hidden = torch.arange(length, device=rows.device) > positions[:, None]
        scores = (query @ key.transpose(2, 3)) * self.width**-0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if self.differential:
            differential_lambda = inputs["differential_lambda"]
            if differential_lambda.dim() > 1:
                differential_lambda = differential_lambda.transpose(1, 2)[:, :, rows]
            size = maps // (maps - self.heads)  # maps per group: the signals, then their noise
            signals = weights.unflatten(1, (-1, size))[:, :, :-1].flatten(1, 2)
            noise = weights[:, size - 1 :: size].repeat_interleave(size - 1, 1)
            weights = (signals - differential_lambda * noise).to(value.dtype)
        return (weights @ value.repeat_interleave(self.heads // value.shape[1], 1)).transpose(1, 2)

    def backward(self) -> None:
        """Run a forward and a backward, and discard the gradients."""
        self().backward(self.gradient)
        for tensor in self.inputs.values():
            tensor.grad = None


def in_dtype(attention: Attention, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Copy the inputs to another dtype, except λ, which stays in float32."""
    return {
        name: tensor.detach().to(tensor.dtype if name == "differential_lambda" else dtype).requires_grad_()
        for name, tensor in attention.inputs.items()
    }


@torch.no_grad()
def check_outputs(attention: Attention) -> None:
    """Compare outputs with plain PyTorch's at `CHECKED_QUERIES` queries of the sequence.

    Raises:
        CorrectnessError: they differ.
    """
    count, setting = attention.query.shape[1], attention.setting
    rows = torch.linspace(0, count - 1, min(count, CHECKED_QUERIES), device=setting.device).long()
    compare_with_plain(
        "output",
        {"attention": attention()[:, rows]},
        lambda dtype: {"attention": attention.plain(in_dtype(attention, dtype), rows)},
        setting.torch_dtype,
    )


def check_gradients(attention: Attention) -> None:
    """Compare the gradients of all inputs with plain PyTorch's.

    Raises:
        CorrectnessError: they differ.
    """
    setting = attention.setting
    generator = torch.Generator(setting.device).manual_seed(1)
    directions = [
        torch.randn(attention.gradient.shape, generator=generator, device=setting.device).to(setting.torch_dtype)
        for _ in range(1 if setting.dtype == "float32" else SAMPLES)
    ]
    rows = torch.arange(attention.query.shape[1], device=setting.device)

    def gradients(inputs: Tensors, outputs: torch.Tensor) -> dict[str, torch.Tensor]:
        by_name: dict[str, torch.Tensor] = {}
        for i, direction in enumerate(directions):
            grads = torch.autograd.grad(
                outputs, list(inputs.values()), direction.to(outputs.dtype), retain_graph=True, allow_unused=True
            )
            by_name |= {f"{name} {i}": grad for name, grad in zip(inputs, grads, strict=True) if grad is not None}
        return by_name

    def plain(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        inputs = in_dtype(attention, dtype)
        return gradients(inputs, attention.plain(inputs, rows))

    compare_with_plain("gradient", gradients(attention.inputs, attention()), plain, setting.torch_dtype)


def forward(attention: Attention, implementation: str) -> Step:
    """Return the step of a forward: of a whole sequence, or of one query with a KV cache."""
    batch, queries = attention.query.shape[:2]

    @torch.no_grad()
    def run() -> torch.Tensor:
        return attention()

    return Step(run, partial(check_outputs, attention), batch * queries, partial(attention.use, implementation))


def train(attention: Attention, implementation: str) -> Step:
    """Return the step of a forward and a backward with gradients of all inputs."""
    setting = attention.setting

    def check() -> None:
        short = Attention(attention.architecture, replace(setting, length=min(setting.length, CHECKED_LENGTH)))
        short.use(implementation)
        check_outputs(short)
        check_gradients(short)

    return Step(attention.backward, check, setting.batch * setting.length, partial(attention.use, implementation))
