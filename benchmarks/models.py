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

from benchmarks.correctness import CHECKED_LENGTH, SAMPLES, CorrectnessError, compare, compare_with_plain
from benchmarks.implementations import Architecture, Setting, build
from benchmarks.measure import Step


CHECKED_CACHE = 8192
"""Decoding is checked after so many tokens of the cache, or after all if they are less."""

LEARNING_RATE = {"float32": 1e-4, "bfloat16": 1e-2}
"""By dtype of the weights. In bfloat16 a smaller step would leave weights of 1 as they are."""


@dataclass
class LoadedModel:
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

    def step(
        self, run: Callable[[], Any], check: Callable[[], None], tokens: int, implementation: str, **more: Any
    ) -> Step:
        """A step with an attention function."""
        return Step(run, check, tokens, partial(self.model.set_attn_implementation, implementation), **more)


def plain_model(architecture: Architecture, setting: Setting) -> LoadedModel:
    """With random weights."""
    return LoadedModel(architecture, setting, build(architecture, setting))


@torch.no_grad()
def model_with_cache(architecture: Architecture, setting: Setting) -> LoadedModel:
    """With a dynamic cache of the setting's length: of keys and values of `CHECKED_CACHE` tokens, again and again."""
    loaded = plain_model(architecture, setting)
    read = min(setting.length, CHECKED_CACHE)
    filled = loaded.model(loaded.tokens(read), use_cache=True, logits_to_keep=1).past_key_values
    loaded.cache, times = DynamicCache(), -(-setting.length // read)
    for i, layer in enumerate(filled.layers):
        keys, values = (tensor.repeat(1, 1, times, 1)[:, :, : setting.length] for tensor in (layer.keys, layer.values))
        loaded.cache.update(keys, values, i)
    return loaded


def trained_model(
    architecture: Architecture, setting: Setting, checkpointing: bool = False, autocast: bool = False
) -> LoadedModel:
    """With AdamW, fused, as the Trainer's.

    Args:
        architecture: which.
        setting: sizes.
        checkpointing: activations are computed again in the backward.
        autocast: kernels compute in bfloat16, weights stay what they are.
    """
    loaded = plain_model(architecture, setting)
    loaded.model.train()
    if checkpointing:
        loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
    loaded.optimizer = AdamW(loaded.model.parameters(), lr=LEARNING_RATE[setting.dtype], fused=True)
    loaded.autocast = autocast
    return loaded


def compare_logits(loaded: LoadedModel, compute: Callable[[PreTrainedModel], torch.Tensor]) -> None:
    """Raises `CorrectnessError` unless a computation of logits gives those of eager attention."""
    values = {"logits": compute(loaded.model)}
    compare_with_plain(
        "output", values, lambda dtype: {"logits": compute(loaded.plain(dtype))}, loaded.setting.torch_dtype
    )


def prefill(loaded: LoadedModel, implementation: str) -> Step:
    """A prompt at once, into a new cache; logits of its last token."""
    input_ids = loaded.tokens()

    @torch.no_grad()
    def check() -> None:
        compare_logits(loaded, lambda model: model(loaded.short(), logits_to_keep=16).logits)

    @torch.no_grad()
    def run() -> Any:
        return loaded.model(input_ids, use_cache=True, logits_to_keep=1)

    return loaded.step(run, check, input_ids.numel(), implementation)


def decode(loaded: LoadedModel, implementation: str) -> Step:
    """One token after the cache, which is as before afterwards."""
    token, model, cache = loaded.tokens(1), loaded.model, loaded.cache
    assert cache is not None

    @torch.no_grad()
    def check() -> None:
        def decoded(model: PreTrainedModel) -> torch.Tensor:
            own = DynamicCache()
            for i, layer in enumerate(cache.layers):
                keys, values = (tensor[:, :, :CHECKED_CACHE].to(model.dtype) for tensor in (layer.keys, layer.values))
                own.update(keys, values, i)
            return model(token, past_key_values=own, use_cache=True).logits

        compare_logits(loaded, decoded)

    @torch.no_grad()
    def run() -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return loaded.step(run, check, token.numel(), implementation)


def backward(model: PreTrainedModel, input_ids: torch.Tensor, autocast: bool) -> None:
    """Computes gradients of the mean loss."""
    with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()


def gradients(model: PreTrainedModel, texts: list[torch.Tensor], autocast: bool) -> dict[str, torch.Tensor]:
    """All gradients of the first text, and those of vectors (λ, norms) of every text, by name, on the CPU."""
    by_name = {}
    for i, input_ids in enumerate(texts):
        backward(model, input_ids, autocast)
        for name, p in model.named_parameters():
            if p.grad is not None and (i == 0 or p.dim() == 1):
                by_name[f"{name} {i}"] = p.grad.cpu()
        model.zero_grad()
    return by_name


def check_training(loaded: LoadedModel, update: Callable[[torch.Tensor], None]) -> None:
    """Raises `CorrectnessError` unless all gradients are eager attention's, and a step changes every weight."""
    model, own, texts = loaded.model, loaded.setting.torch_dtype, [loaded.short()]
    if loaded.low_precision:
        texts += [loaded.tokens(65, seed) for seed in range(1, SAMPLES)]
    truth = gradients(loaded.plain(torch.float32).train(), texts, autocast=False)
    inevitable = gradients(loaded.plain(own).train(), texts, loaded.autocast) if loaded.low_precision else None
    compare("gradient", gradients(model, texts, loaded.autocast), truth, inevitable)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update(texts[0])
    for name, p in model.named_parameters():
        if torch.equal(p, before[name]):
            raise CorrectnessError(f"a step does not change {name}")


def train(loaded: LoadedModel, implementation: str) -> Step:
    """Forward, backward, AdamW and `zero_grad`."""
    input_ids, model, optimizer = loaded.tokens(), loaded.model, loaded.optimizer
    assert optimizer is not None

    def update(input_ids: torch.Tensor) -> None:
        backward(model, input_ids, loaded.autocast)
        optimizer.step()
        optimizer.zero_grad()

    def kept() -> dict[str, int]:
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        tensors = {"weights": list(model.parameters()), "optimizer": states}
        return {name: sum(tensor.nbytes for tensor in kind) for name, kind in tensors.items()}

    run, check = partial(update, input_ids), partial(check_training, loaded, update)
    return loaded.step(run, check, input_ids.numel(), implementation, kept=kept)


LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""How far a generated token's logit may be below the largest one, in standard deviations of the logits."""


@torch.no_grad()
def check_generated(loaded: LoadedModel, prompts: list[list[int]], generated: list[list[int]]) -> None:
    """Raises `CorrectnessError` unless every token has (nearly) the largest logit that eager attention computes."""
    model, new = loaded.plain(torch.float32), loaded.setting.new_tokens
    for prompt, text in zip(prompts, generated, strict=True):
        if len(text) != new:
            raise CorrectnessError(f"generated {len(text)} tokens, not {new}")
        input_ids = torch.tensor([prompt + text], device=loaded.setting.device)
        logits = model(input_ids, logits_to_keep=new + 1).logits[0, :-1]
        chosen = logits.gather(1, input_ids[0, -new:, None])[:, 0]
        gap = ((logits.amax(1) - chosen) / logits.std(1)).max().item()
        if not gap <= LARGEST_GAP[loaded.setting.dtype]:
            raise CorrectnessError(f"a generated token's logit is {gap:.1e} deviations below eager attention's largest")


def continuation(
    loaded: LoadedModel,
    implementation: str,
    prompts: Callable[[torch.Tensor], list[list[int]]],
    continued: Callable[[list[list[int]]], list[list[int]]],
) -> Step:
    """The greedy continuation of what `prompts` makes of token ids [batch, length]."""

    def check() -> None:
        checked = prompts(loaded.short())
        check_generated(loaded, checked, continued(checked))

    tokens = loaded.setting.batch * loaded.setting.new_tokens
    return loaded.step(partial(continued, prompts(loaded.tokens())), check, tokens, implementation)


def greedy(setting: Setting, **more: Any) -> GenerationConfig:
    """Generates so many tokens whatever they are."""
    return GenerationConfig(max_new_tokens=setting.new_tokens, do_sample=False, pad_token_id=0, **more)


def generate(loaded: LoadedModel, implementation: str, cache_implementation: str | None = None) -> Step:
    """Prompts of equal length, continued greedily. The cache is dynamic by default."""
    config = greedy(loaded.setting, cache_implementation=cache_implementation)

    def continued(prompts: list[list[int]]) -> list[list[int]]:
        input_ids = torch.tensor(prompts, device=loaded.setting.device)
        texts = loaded.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        return texts[:, input_ids.shape[1] :].tolist()

    return continuation(loaded, implementation, torch.Tensor.tolist, continued)


def continuous(loaded: LoadedModel, implementation: str) -> Step:
    """Prompts of a quarter of the length to the whole, by `generate_batch`: paged cache, mixed prefill and decoding."""
    setting = loaded.setting

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
        outputs = loaded.model.generate_batch(
            prompts,
            generation_config=greedy(setting, eos_token_id=-1),  # none
            continuous_batching_config=copy.deepcopy(config),
            progress_bar=False,
        )
        return [output.generated_tokens for output in outputs.values()]

    return continuation(loaded, implementation, shares, continued)
