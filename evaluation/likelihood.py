# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of texts and of continuations, and greedy completions, in bounded memory."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from diffllama.evaluation.models import LoadedModel


CHUNK = 1024
"""Tokens of a long text per forward pass, so that logits are never [n, vocabulary]."""

K = TypeVar("K")


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for the model.

    Raises:
        ValueError: the model keeps a recurrent state, which the cache does not carry from chunk to chunk.
    """
    if model._is_stateful:
        kind = model.config.model_type
        raise ValueError(f"A `{kind}` keeps a recurrent state, which this probe cannot carry from chunk to chunk.")
    return DynamicCache(config=model.config)


def gather_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of tokens: logits [b, n, vocabulary] and ids [b, n] -> [b, n], in float32."""
    return -torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), ids, reduction="none")


@torch.inference_mode()
def token_log_probs(model: PreTrainedModel, ids: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """Log-probability of every token but the first, given all before it: ids [1, n] -> [n - 1], float32, on the CPU.

    The cache of all tokens must fit into memory; `chunk` tokens are computed at once.

    Raises:
        ValueError: the model keeps a recurrent state.
    """
    cache = new_cache(model)
    parts = []
    for start in range(0, ids.shape[1] - 1, chunk):
        inputs, targets = ids[:, start : start + chunk], ids[:, start + 1 : start + chunk + 1]
        logits = model(inputs, past_key_values=cache, use_cache=True).logits[:, : targets.shape[1]]
        parts.append(gather_log_probs(logits, targets)[0].cpu())
    return torch.cat(parts)


def likeliest(scores: Sequence[float] | np.ndarray, dtype: str, option: str = "--dtype") -> int:
    """Index of the highest score; of equal scores, the first.

    Raises:
        ValueError: a score is NaN. The message names the model's `dtype` and the `option` that changes it.
    """
    if np.isnan(scores).any():
        raise ValueError(f"The model's scores are not numbers (NaN) in {dtype}. Try another {option}.")
    return int(np.argmax(scores))


def batches(lengths: Mapping[K, int], batch_tokens: int) -> Iterator[list[K]]:
    """Batches of sequences of equal length, longest first, of at most `batch_tokens` tokens or one sequence.

    Equal lengths need no padding, so no result depends on the other sequences of a batch. `lengths` are by any key.
    """
    by_length: dict[int, list[K]] = {}
    for key, length in lengths.items():
        by_length.setdefault(length, []).append(key)
    for length, keys in sorted(by_length.items(), key=itemgetter(0), reverse=True):
        rows = max(1, batch_tokens // max(1, length))
        yield from (keys[start : start + rows] for start in range(0, len(keys), rows))


@torch.inference_mode()
def continuation_log_probs(
    loaded: LoadedModel, pairs: Mapping[K, tuple[str, str]], batch_tokens: int = 4096
) -> Iterator[tuple[K, float]]:
    """Log-likelihoods of continuations, given their contexts (pairs by any key): key, and sum over the tokens.

    Trailing space of a context counts as part of its continuation.
    """
    rows: dict[K, list[int]] = {}
    starts: dict[K, int] = {}
    for key, (context, continuation) in pairs.items():
        before = loaded.prefix + loaded.encode(context.rstrip())
        rows[key] = loaded.prefix + loaded.encode(context + continuation)
        starts[key] = max(1, min(len(before), len(rows[key]) - 1))  # a model says nothing about its first token
    for keys in batches({key: len(row) for key, row in rows.items()}, batch_tokens):
        ids = torch.tensor([rows[key] for key in keys], device=loaded.model.device)
        first = min(starts[key] for key in keys)
        logits = loaded.model(ids, use_cache=False, logits_to_keep=ids.shape[1] - first + 1).logits[:, :-1]
        for key, scores in zip(keys, gather_log_probs(logits, ids[:, first:]), strict=True):
            yield key, scores[starts[key] - first :].sum().item()


@torch.inference_mode()
def completions(
    loaded: LoadedModel,
    prompts: Mapping[K, list[int]],
    max_new_tokens: int,
    batch_tokens: int = 4096,
    stop: Sequence[str] = (),
) -> Iterator[tuple[K, str]]:
    """Greedy completions of prompts (token ids by any key), batch by batch: key, and text without special tokens.

    A batch has at most `batch_tokens` tokens of prompts. A completion ends before the first string of `stop` in it.
    """
    tokenizer = loaded.tokenizer
    pad = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    for keys in batches({key: len(prompt) for key, prompt in prompts.items()}, batch_tokens):
        ids = torch.tensor([prompts[key] for key in keys], device=loaded.model.device)

        # transformers' StopStringCriteria fails with word-level tokenizers and matches strings that begin in the prompt
        def ended(ids: torch.Tensor, scores: object, start: int = ids.shape[1], **kwargs: object) -> torch.Tensor:
            texts = tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
            return torch.tensor([any(string in text for string in stop) for text in texts], device=ids.device)

        generated = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,  # a checkpoint's own settings may punish the repetition that a probe asks for
            no_repeat_ngram_size=0,
            pad_token_id=pad,
            stopping_criteria=[ended] if stop else None,
        )
        for key, row in zip(keys, generated[:, ids.shape[1] :], strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            yield key, text[: min((at for string in stop if (at := text.find(string)) >= 0), default=None)]
