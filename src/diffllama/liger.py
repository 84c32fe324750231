# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Liger's Triton kernels for the model: what `TrainingArguments(use_liger_kernel=True)` applies."""

import functools
from types import MethodType
from typing import Any

import torch
from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.model.llama import lce_maybe_trainable_lm_head
from liger_kernel.transformers.model.loss_utils import unpack_cross_entropy_result
from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP

from diffllama.modeling_diff.configuration_diffllama import DiffLlamaConfig
from diffllama.modeling_diff.modeling_diffllama import DiffLlamaForCausalLM


@functools.wraps(DiffLlamaForCausalLM.forward)  # Trainers read its signature
def forward_without_logits(
    self: DiffLlamaForCausalLM,
    *args: Any,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    skip_logits: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run the model. In training, or with `skip_logits`, compute the loss without the logits, which are `None`.

    The other arguments and outputs are those of `DiffLlamaForCausalLM.forward`.
    """
    targets = {"labels": labels, "shift_labels": shift_labels}
    if not (self.training if skip_logits is None else skip_logits) or (labels is None and shift_labels is None):
        return type(self).forward(self, *args, **kwargs, **{name: v for name, v in targets.items() if v is not None})
    kept = kwargs.pop("logits_to_keep", 0)
    return_dict = kwargs.pop("return_dict", None)
    outputs = self.model(*args, **kwargs)
    hidden_states = outputs.last_hidden_state[:, slice(-kept, None) if isinstance(kept, int) else kept, :]
    result = lce_maybe_trainable_lm_head(self, hidden_states, self.config.hidden_size, **targets, **kwargs)
    loss, *_ = unpack_cross_entropy_result(result)
    output = CausalLMOutputWithPast(loss, None, outputs.past_key_values, outputs.hidden_states, outputs.attentions)
    return output.to_tuple() if return_dict is False else output


def apply_liger_kernel(
    model: PreTrainedModel,
    rms_norm: bool = True,
    swiglu: bool = True,
    fused_linear_cross_entropy: bool = True,
    cross_entropy: bool = False,
    rope: bool = False,
) -> None:
    """Replace operations of a model by Liger's kernels, which need a GPU. Any option is one of `liger_kernel_config`.

    Args:
        rms_norm: the layers' norms, those of queries and keys, and V1's head norm where it has a weight.
        swiglu: the product in the MLP, if the model has a gated MLP with SiLU.
        fused_linear_cross_entropy: the language model's loss, without logits [tokens, vocab_size] in memory.

    Raises:
        ValueError: `cross_entropy` or `rope` is set, for which there is no kernel here.
    """
    for name, value in {"cross_entropy": cross_entropy, "rope": rope}.items():
        if value:
            raise ValueError(f"`liger_kernel_config`: `{name}` is not supported for this model, got {value}.")
    for module in model.modules():
        kind = type(module).__name__
        if rms_norm and kind == "DiffLlamaRMSNorm" and module.weight is not None:
            monkey_patch._patch_rms_norm_module(module)
        elif swiglu and type(module) is LlamaMLP and model.config.hidden_act in ("silu", "swish"):
            monkey_patch._patch_swiglu_module(module, LigerSwiGLUMLP)
    if fused_linear_cross_entropy and hasattr(model, "lm_head"):
        model.forward = MethodType(forward_without_logits, model)


monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[DiffLlamaConfig.model_type] = apply_liger_kernel
