# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models: prefill, decoding, training steps and generation of text."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.correctness import CHECKED_LENGTH, SAMPLES, Wrong, compare
from benchmarks.measure import Step
from benchmarks.peers import Architecture, Setting, build


CHECKED_CACHE = 8192
"""Decoding is checked after so many tokens of the cache, or after all if they are less."""

LEARNING_RATE = {"float32": 1e-4, "bfloat16": 1e-2}
"""By dtype of the weights. In bfloat16 a smaller step would leave weights of 1 as they are."""


@dataclass
class Subject:
    """A model that all attention functions compute in turn, and what steps need besides."""

    architecture: Architecture
    setting: Setting
    model: PreTrainedModel
    cache: Cache | None = None
    optimizer: AdamW | None = None
    autocast: bool = False

    @property
    def low_precision(self) -> bool:
        """Whether anything is computed in less than float32."""
        return self.autocast or self.setting.dtype != "float32"

    def tokens(self, length: int | None = None, seed: int = 0) -> torch.Tensor:
        """Random token ids [batch, length]; the setting's length by default."""
        shape = (self.setting.batch, length or self.setting.length)
        ids = torch.randint(1, self.model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
        return ids.to(self.setting.device)

    def short(self) -> torch.Tensor:
        """Token ids of the length at which plain PyTorch checks."""
        return self.tokens(min(self.setting.length, CHECKED_LENGTH))

    def plain(self, dtype: torch.dtype) -> PreTrainedModel:
        """A copy of the model that computes eager attention in another dtype."""
        model = build(self.architecture, self.setting, "eager", dtype)
        model.load_state_dict(self.model.state_dict())
        return model

    def step(self, run: Callable[[], Any], check: Callable[[], None], implementation: str, **more: Any) -> Step:
        """A step with an attention function."""
        before = partial(self.model.set_attn_implementation, implementation)

        def checked() -> None:
            before()
            check()

        return Step(run, checked, before, **more)


def plain_model(architecture: Architecture, setting: Setting) -> Subject:
    """With random weights."""
    return Subject(architecture, setting, build(architecture, setting))


@torch.no_grad()
def model_with_cache(architecture: Architecture, setting: Setting) -> Subject:
    """With a dynamic cache of the setting's length: of keys and values of `CHECKED_CACHE` tokens, again and again."""
    subject = plain_model(architecture, setting)
    read = min(setting.length, CHECKED_CACHE)
    filled = subject.model(subject.tokens(read), use_cache=True, logits_to_keep=1).past_key_values
    subject.cache, times = DynamicCache(), -(-setting.length // read)
    for i, layer in enumerate(filled.layers):
        keys, values = (tensor.repeat(1, 1, times, 1)[:, :, : setting.length] for tensor in (layer.keys, layer.values))
        subject.cache.update(keys, values, i)
    return subject


def trained_model(
    architecture: Architecture, setting: Setting, checkpointing: bool = False, autocast: bool = False
) -> Subject:
    """With AdamW, fused, as the Trainer's.

    Args:
        architecture: which.
        setting: sizes.
        checkpointing: activations are computed again in the backward.
        autocast: kernels compute in bfloat16, weights stay what they are.
    """
    subject = plain_model(architecture, setting)
    subject.model.train()
    if checkpointing:
        subject.model.gradient_checkpointing_enable({"use_reentrant": False})
    subject.optimizer = AdamW(subject.model.parameters(), lr=LEARNING_RATE[setting.dtype], fused=True)
    subject.autocast = autocast
    return subject


def compare_logits(subject: Subject, compute: Callable[[PreTrainedModel, torch.dtype], torch.Tensor]) -> None:
    """Raises `Wrong` unless a computation of logits gives those of eager attention."""
    own = subject.setting.torch_dtype
    values = {"logits": compute(subject.model, own)}
    truth = {"logits": compute(subject.plain(torch.float32), torch.float32)}
    inevitable = {"logits": compute(subject.plain(own), own)} if subject.low_precision else None
    compare("output", values, truth, inevitable)


def prefill(subject: Subject, implementation: str) -> Step:
    """A prompt at once, into a new cache; logits of its last token."""
    input_ids = subject.tokens()

    @torch.no_grad()
    def check() -> None:
        compare_logits(subject, lambda model, _: model(subject.short(), logits_to_keep=16).logits)

    @torch.no_grad()
    def run() -> Any:
        return model(input_ids, use_cache=True, logits_to_keep=1)

    model = subject.model
    return subject.step(run, check, implementation)


def decode(subject: Subject, implementation: str) -> Step:
    """One token after the cache, which is as before afterwards."""
    token, model, cache = subject.tokens(1), subject.model, subject.cache
    assert cache is not None

    @torch.no_grad()
    def check() -> None:
        def decoded(model: PreTrainedModel, dtype: torch.dtype) -> torch.Tensor:
            own = DynamicCache()
            for i, layer in enumerate(cache.layers):
                keys, values = (tensor[:, :, :CHECKED_CACHE].to(dtype) for tensor in (layer.keys, layer.values))
                own.update(keys, values, i)
            return model(token, past_key_values=own, use_cache=True).logits

        compare_logits(subject, decoded)

    @torch.no_grad()
    def run() -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return subject.step(run, check, implementation)


def backward(model: PreTrainedModel, input_ids: torch.Tensor, autocast: bool) -> None:
    """Computes gradients of the mean loss."""
    with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()


def gradients(model: PreTrainedModel, texts: list[torch.Tensor], autocast: bool) -> dict[str, torch.Tensor]:
    """All gradients of the first text, and those of vectors (λ, norms) of every text, by name, on the CPU."""
    found = {}
    for i, input_ids in enumerate(texts):
        backward(model, input_ids, autocast)
        for name, p in model.named_parameters():
            if p.grad is not None and (i == 0 or p.dim() == 1):
                found[f"{name} {i}"] = p.grad.cpu()
        model.zero_grad()
    return found


def check_training(subject: Subject, update: Callable[[torch.Tensor], None]) -> None:
    """Raises `Wrong` unless all gradients are eager attention's, and a step changes every weight."""
    model, own, texts = subject.model, subject.setting.torch_dtype, [subject.short()]
    if subject.low_precision:
        texts += [subject.tokens(65, seed) for seed in range(1, SAMPLES)]
    truth = gradients(subject.plain(torch.float32).train(), texts, autocast=False)
    inevitable = gradients(subject.plain(own).train(), texts, subject.autocast) if subject.low_precision else None
    compare("gradient", gradients(model, texts, subject.autocast), truth, inevitable)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update(texts[0])
    for name, p in model.named_parameters():
        if torch.equal(p, before[name]):
            raise Wrong(f"a step does not change {name}")


def train(subject: Subject, implementation: str) -> Step:
    """Forward, backward, AdamW and `zero_grad`."""
    input_ids, model, optimizer = subject.tokens(), subject.model, subject.optimizer
    assert optimizer is not None

    def update(input_ids: torch.Tensor) -> None:
        backward(model, input_ids, subject.autocast)
        optimizer.step()
        optimizer.zero_grad()

    def kept() -> dict[str, int]:
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        tensors = {"weights": list(model.parameters()), "optimizer": states}
        return {name: sum(tensor.nbytes for tensor in those) for name, those in tensors.items()}

    run, check = partial(update, input_ids), partial(check_training, subject, update)
    return subject.step(run, check, implementation, kept=kept)


LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""How far a generated token's logit may be below the largest one, in standard deviations of the logits."""


@torch.no_grad()
def check_generated(subject: Subject, prompts: list[list[int]], generated: list[list[int]]) -> None:
    """Raises `Wrong` unless every token has the largest logit of eager attention after what is before it, or nearly."""
    model, new = subject.plain(torch.float32), subject.setting.new_tokens
    for prompt, text in zip(prompts, generated, strict=True):
        if len(text) != new:
            raise Wrong(f"generated {len(text)} tokens, not {new}")
        input_ids = torch.tensor([prompt + text], device=subject.setting.device)
        logits = model(input_ids, logits_to_keep=new + 1).logits[0, :-1]
        chosen = logits.gather(1, input_ids[0, -new:, None])[:, 0]
        gap = ((logits.amax(1) - chosen) / logits.std(1)).max().item()
        if not gap <= LARGEST_GAP[subject.setting.dtype]:
            raise Wrong(f"a generated token's logit is {gap:.1e} deviations below eager attention's largest")


def greedy(setting: Setting, **more: Any) -> GenerationConfig:
    """Generates so many tokens whatever they are."""
    return GenerationConfig(max_new_tokens=setting.new_tokens, do_sample=False, pad_token_id=0, **more)


def generate(subject: Subject, implementation: str, cache_implementation: str | None = None) -> Step:
    """Prompts of equal length, continued greedily. The cache is dynamic by default."""
    config = greedy(subject.setting, cache_implementation=cache_implementation)

    def continued(input_ids: torch.Tensor) -> list[list[int]]:
        texts = subject.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        return texts[:, input_ids.shape[1] :].tolist()

    def check() -> None:
        check_generated(subject, subject.short().tolist(), continued(subject.short()))

    return subject.step(partial(continued, subject.tokens()), check, implementation)


def continuous(subject: Subject, implementation: str) -> Step:
    """Prompts of a quarter of the length to the whole, by `generate_batch`: paged cache, mixed prefill and decoding."""
    setting = subject.setting

    def shares(ids: torch.Tensor) -> list[list[int]]:
        n, steps = ids.shape[1], max(setting.batch - 1, 1)
        return [row[: max(n * (4 * steps - 3 * i) // (4 * steps), 1)] for i, row in enumerate(ids.tolist())]

    config = ContinuousBatchingConfig()
    config.auto_switch_to_flash = False  # what is timed is what is said
    if setting.device == "cpu":
        page = "page_size" if hasattr(config, "page_size") else "block_size"  # its older name
        setattr(config, page, 32)
        config.num_blocks = setting.batch * -(-(setting.length + setting.new_tokens + 1) // 32) + 1
        config.max_batch_tokens = 512
        config.use_async_batching = config.use_cuda_graph = False

    def continued(prompts: list[list[int]]) -> list[list[int]]:
        outputs = subject.model.generate_batch(
            prompts,
            generation_config=greedy(setting, eos_token_id=-1),  # none
            continuous_batching_config=copy.deepcopy(config),
            progress_bar=False,
        )
        return [output.generated_tokens for output in outputs.values()]

    def check() -> None:
        prompts = shares(subject.short())
        check_generated(subject, prompts, continued(prompts))

    return subject.step(partial(continued, shares(subject.tokens())), check, implementation)
