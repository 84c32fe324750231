# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models: prefill, decoding, training steps and text generation."""

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
"""Largest number of tokens in the KV cache when decoding is checked."""

LEARNING_RATE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Learning rate by dtype of the weights. In bfloat16, rounding undoes a smaller update of a weight of 1."""


@dataclass
class LoadedModel:
    """A model that all its attention functions share, with the cache or optimizer that a step needs."""

    architecture: Architecture
    setting: Setting
    model: PreTrainedModel
    cache: Cache | None = None
    optimizer: AdamW | None = None
    autocast: bool = False

    @property
    def low_precision(self) -> bool:
        """Whether weights or kernels have a lower precision than float32."""
        return self.autocast or self.setting.dtype != "float32"

    def tokens(self, length: int | None = None, seed: int = 0) -> torch.Tensor:
        """Return random token ids [batch, length], by default of the setting's length."""
        shape = (self.setting.batch, length or self.setting.length)
        ids = torch.randint(1, self.model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
        return ids.to(self.setting.device)

    def short(self) -> torch.Tensor:
        """Return random token ids for checks, of at most `CHECKED_LENGTH` tokens."""
        return self.tokens(min(self.setting.length, CHECKED_LENGTH))

    def plain(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return a copy of the model with eager attention in another dtype."""
        model = build(self.architecture, self.setting, "eager", dtype)
        model.load_state_dict(self.model.state_dict())
        return model

    def step(
        self, run: Callable[[], Any], check: Callable[[], None], tokens: int, implementation: str, **options: Any
    ) -> Step:
        """Return a step that selects an attention function of the model before each call."""
        return Step(run, check, tokens, partial(self.model.set_attn_implementation, implementation), **options)


def plain_model(architecture: Architecture, setting: Setting) -> LoadedModel:
    """Load a model with random weights."""
    return LoadedModel(architecture, setting, build(architecture, setting))


@torch.no_grad()
def model_with_cache(architecture: Architecture, setting: Setting) -> LoadedModel:
    """Load a model and fill a dynamic cache of the setting's length.

    The keys and values of at most `CHECKED_CACHE` tokens are computed and then repeated.
    """
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
    """Load a model and fused AdamW, the optimizer of transformers' Trainer.

    Args:
        architecture: architecture of the model.
        setting: sizes, dtype and device.
        checkpointing: whether to use gradient checkpointing.
        autocast: whether to compute in bfloat16 with autocast; the weights keep their dtype.
    """
    loaded = plain_model(architecture, setting)
    loaded.model.train()
    if checkpointing:
        loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
    loaded.optimizer = AdamW(loaded.model.parameters(), lr=LEARNING_RATE[setting.dtype], fused=True)
    loaded.autocast = autocast
    return loaded


def compare_logits(loaded: LoadedModel, compute: Callable[[PreTrainedModel], torch.Tensor]) -> None:
    """Compare the logits of a computation with those of eager attention.

    Raises:
        CorrectnessError: they differ.
    """
    values = {"logits": compute(loaded.model)}
    compare_with_plain(
        "output", values, lambda dtype: {"logits": compute(loaded.plain(dtype))}, loaded.setting.torch_dtype
    )


def prefill(loaded: LoadedModel, implementation: str) -> Step:
    """Return the step of a prefill: the whole prompt into a new cache, with the logits of the last token."""
    input_ids = loaded.tokens()

    @torch.no_grad()
    def check() -> None:
        compare_logits(loaded, lambda model: model(loaded.short(), logits_to_keep=16).logits)

    @torch.no_grad()
    def run() -> Any:
        return loaded.model(input_ids, use_cache=True, logits_to_keep=1)

    return loaded.step(run, check, input_ids.numel(), implementation)


def decode(loaded: LoadedModel, implementation: str) -> Step:
    """Return the step of decoding one token with the cache. Each run restores the cache."""
    token, model, cache = loaded.tokens(1), loaded.model, loaded.cache
    assert cache is not None

    @torch.no_grad()
    def check() -> None:
        def decoded(model: PreTrainedModel) -> torch.Tensor:
            copied = DynamicCache()
            for i, layer in enumerate(cache.layers):
                keys, values = (tensor[:, :, :CHECKED_CACHE].to(model.dtype) for tensor in (layer.keys, layer.values))
                copied.update(keys, values, i)
            return model(token, past_key_values=copied, use_cache=True).logits

        compare_logits(loaded, decoded)

    @torch.no_grad()
    def run() -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return loaded.step(run, check, token.numel(), implementation)


def backward(model: PreTrainedModel, input_ids: torch.Tensor, autocast: bool) -> None:
    """Compute the gradients of the mean loss."""
    with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()


def gradients(model: PreTrainedModel, texts: list[torch.Tensor], autocast: bool) -> dict[str, torch.Tensor]:
    """Return gradients by name, on the CPU: all of the first text, and those of vectors (λ, norms) of every text."""
    by_name = {}
    for i, input_ids in enumerate(texts):
        backward(model, input_ids, autocast)
        for name, p in model.named_parameters():
            if p.grad is not None and (i == 0 or p.dim() == 1):
                by_name[f"{name} {i}"] = p.grad.cpu()
        model.zero_grad()
    return by_name


def check_training(loaded: LoadedModel, update: Callable[[torch.Tensor], None]) -> None:
    """Compare gradients with those of eager attention, and check that a training step changes every weight.

    Raises:
        CorrectnessError: a gradient differs, or a weight stays the same.
    """
    model, dtype, texts = loaded.model, loaded.setting.torch_dtype, [loaded.short()]
    if loaded.low_precision:
        texts += [loaded.tokens(65, seed) for seed in range(1, SAMPLES)]
    truth = gradients(loaded.plain(torch.float32).train(), texts, autocast=False)
    plain = gradients(loaded.plain(dtype).train(), texts, loaded.autocast) if loaded.low_precision else None
    compare("gradient", gradients(model, texts, loaded.autocast), truth, plain)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update(texts[0])
    for name, p in model.named_parameters():
        if torch.equal(p, before[name]):
            raise CorrectnessError(f"a training step does not change {name}")


def train(loaded: LoadedModel, implementation: str) -> Step:
    """Return the step of training: forward, backward, AdamW and `zero_grad`."""
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
"""Largest difference between the largest logit and a generated token's, in standard deviations of the logits."""


@torch.no_grad()
def check_generated(loaded: LoadedModel, prompts: list[list[int]], generated: list[list[int]]) -> None:
    """Check that each generated token has the largest logit of eager attention, or nearly so.

    Raises:
        CorrectnessError: a logit is more than `LARGEST_GAP` below the largest, or the number of tokens is wrong.
    """
    model, new = loaded.plain(torch.float32), loaded.setting.new_tokens
    for prompt, text in zip(prompts, generated, strict=True):
        if len(text) != new:
            raise CorrectnessError(f"generated {len(text)} tokens instead of {new}")
        input_ids = torch.tensor([prompt + text], device=loaded.setting.device)
        logits = model(input_ids, logits_to_keep=new + 1).logits[0, :-1]
        chosen = logits.gather(1, input_ids[0, -new:, None])[:, 0]
        gap = ((logits.amax(1) - chosen) / logits.std(1)).max().item()
        if not gap <= LARGEST_GAP[loaded.setting.dtype]:
            raise CorrectnessError(
                f"a generated token's logit is {gap:.1e} standard deviations below eager attention's largest"
            )


def continuation(
    loaded: LoadedModel,
    implementation: str,
    prompts: Callable[[torch.Tensor], list[list[int]]],
    continued: Callable[[list[list[int]]], list[list[int]]],
) -> Step:
    """Return the step of a greedy continuation.

    Args:
        loaded: the model.
        implementation: attention function.
        prompts: makes prompts of token ids [batch, length].
        continued: generates the tokens after each prompt.
    """

    def check() -> None:
        short_prompts = prompts(loaded.short())
        check_generated(loaded, short_prompts, continued(short_prompts))

    tokens = loaded.setting.batch * loaded.setting.new_tokens
    return loaded.step(partial(continued, prompts(loaded.tokens())), check, tokens, implementation)


def greedy(setting: Setting, **options: Any) -> GenerationConfig:
    """Return the configuration of greedy generation of the setting's number of new tokens."""
    return GenerationConfig(max_new_tokens=setting.new_tokens, do_sample=False, pad_token_id=0, **options)


def generate(loaded: LoadedModel, implementation: str, cache_implementation: str | None = None) -> Step:
    """Return the step of greedy generation from prompts of equal length, by default with a dynamic cache."""
    config = greedy(loaded.setting, cache_implementation=cache_implementation)

    def continued(prompts: list[list[int]]) -> list[list[int]]:
        input_ids = torch.tensor(prompts, device=loaded.setting.device)
        texts = loaded.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        return texts[:, input_ids.shape[1] :].tolist()

    return continuation(loaded, implementation, torch.Tensor.tolist, continued)


def continuous(loaded: LoadedModel, implementation: str) -> Step:
    """Return the step of continuous batching with `generate_batch`: paged cache, mixed prefill and decoding.

    Lengths of the prompts range from a quarter of the setting's length to the whole.
    """
    setting = loaded.setting

    def shares(ids: torch.Tensor) -> list[list[int]]:
        n, steps = ids.shape[1], max(setting.batch - 1, 1)
        return [row[: max(n * (4 * steps - 3 * i) // (4 * steps), 1)] for i, row in enumerate(ids.tolist())]

    config = ContinuousBatchingConfig()
    config.auto_switch_to_flash = False  # time the named attention function
    if setting.device == "cpu":
        page = "page_size" if hasattr(config, "page_size") else "block_size"  # the older name
        setattr(config, page, 32)
        config.num_blocks = setting.batch * -(-(setting.length + setting.new_tokens + 1) // 32) + 1
        config.max_batch_tokens = 512
        config.use_async_batching = config.use_cuda_graph = False

    def continued(prompts: list[list[int]]) -> list[list[int]]:
        outputs = loaded.model.generate_batch(
            prompts,
            generation_config=greedy(setting, eos_token_id=-1),  # no token stops generation
            continuous_batching_config=copy.deepcopy(config),
            progress_bar=False,
        )
        return [output.generated_tokens for output in outputs.values()]

    return continuation(loaded, implementation, shares, continued)
