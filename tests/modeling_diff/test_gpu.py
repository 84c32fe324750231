"""Attention functions that need a CUDA device, compared with plain PyTorch in float32: `make test-gpu`."""

import importlib.util

import pytest
import torch
from torch import nn

from diffllama import DiffLlamaForCausalLM
from support.attention_masks import KINDS, batch
from support.tiny_models import VARIANTS, tiny_model, tokens


pytestmark = pytest.mark.gpu

needs_flash_attn = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn: pip install '.[flash]'"
)


def gpu_model(variant: str, dtype: torch.dtype, implementation: str, key_value_heads: int) -> DiffLlamaForCausalLM:
    """Return a model with heads of width 64, which flash-attn supports; equal weights for every implementation."""
    model = tiny_model(
        variant, hidden_size=256, head_dim=64, num_key_value_heads=key_value_heads, initializer_range=0.05
    )
    model.set_attn_implementation(implementation)
    return model.to("cuda", dtype)


def logits_and_gradients(model: DiffLlamaForCausalLM, kind: str, n: int) -> dict[str, torch.Tensor]:
    """Compute the logits of real tokens and every gradient of their cross-entropy, in float32."""
    given, input_ids = batch(kind, n), tokens(2, n).cuda()
    mask = None if given.attention_mask is None else given.attention_mask.cuda()
    logits = model(input_ids, attention_mask=mask, position_ids=given.position_ids.cuda(), use_cache=False).logits
    real = logits[given.real.cuda()].float()
    loss = nn.functional.cross_entropy(real, input_ids[given.real.cuda()])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return {"logits": real.detach(), **{k: g.float() for k, g in zip(names, gradients, strict=True)}}


def exceeding(
    ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """Return the names whose error exceeds twice (gradients: three times) that of plain PyTorch, with both errors."""
    errors = {k: ((ours[k] - truth[k]).abs().max().item(), (plain[k] - truth[k]).abs().max().item()) for k in truth}
    return {k: (e, p) for k, (e, p) in errors.items() if not e <= (2 if k == "logits" else 3) * p}


@needs_flash_attn
@pytest.mark.parametrize("n", [63, 128])
@pytest.mark.parametrize("key_value_heads", [4, 1], ids=["MHA", "groups of 4"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "packed"])  # flash-attn packs one row only
@pytest.mark.parametrize("variant", VARIANTS)
def test_flash_attention_loses_at_most_twice_what_plain_bfloat16_loses(
    variant: str, kind: str, key_value_heads: int, n: int
) -> None:
    truth, plain, ours = (
        logits_and_gradients(gpu_model(variant, dtype, implementation, key_value_heads), kind, n)
        for dtype, implementation in (
            (torch.float32, "eager"),
            (torch.bfloat16, "eager"),
            (torch.bfloat16, "flash_attention_2"),
        )
    )
    assert exceeding(ours, plain, truth) == {}


@needs_flash_attn
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_flash_attention_decodes_what_the_full_forward_gives(variant: str) -> None:
    input_ids = tokens(2, 33).cuda()
    truth = gpu_model(variant, torch.float32, "eager", 2)(input_ids).logits
    plain = gpu_model(variant, torch.bfloat16, "eager", 2)(input_ids).logits.float()
    model = gpu_model(variant, torch.bfloat16, "flash_attention_2", 2)
    cache, steps = None, []
    for piece in (input_ids[:, :16], *input_ids[:, 16:].split(1, dim=1)):
        outputs = model(piece, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        steps.append(outputs.logits.float())
    assert exceeding({"logits": torch.cat(steps, dim=1)}, {"logits": plain}, {"logits": truth}) == {}


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_gradients_equal_eager(variant: str, kind: str, implementation: str) -> None:
    truth = logits_and_gradients(gpu_model(variant, torch.float32, "eager", 2), kind, 64)
    ours = logits_and_gradients(gpu_model(variant, torch.float32, implementation, 2), kind, 64)
    for name in truth:
        error = ((ours[name] - truth[name]).abs().max() / truth[name].abs().max()).item()
        assert error <= 1e-5, name
