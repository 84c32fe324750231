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
"""Tokens of a long text per forward pass, so that logits are at most [CHUNK, vocabulary]."""

K = TypeVar("K")


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Make an empty KV cache for the model.

    Raises:
        ValueError: the model is recurrent; a KV cache does not carry its state from chunk to chunk.
    """
    if model._is_stateful:
        kind = model.config.model_type
        raise ValueError(f"The model type `{kind}` has a recurrent state, which this probe does not support.")
    return DynamicCache(config=model.config)


def gather_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute the log-probabilities of tokens: logits [b, n, vocabulary] and ids [b, n] -> [b, n], in float32."""
    return -torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), ids, reduction="none")


@torch.inference_mode()
def token_log_probs(model: PreTrainedModel, ids: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """Compute the log-probability of every token but the first, given all before it.

    The KV cache of all tokens must fit into memory.

    Args:
        model: a causal language model.
        ids: token ids [1, n].
        chunk: tokens per forward pass.

    Returns:
        [n - 1] in float32 on the CPU.

    Raises:
        ValueError: the model is recurrent.
    """
    cache = new_cache(model)
    parts = []
    for start in range(0, ids.shape[1] - 1, chunk):
        inputs, targets = ids[:, start : start + chunk], ids[:, start + 1 : start + chunk + 1]
        logits = model(inputs, past_key_values=cache, use_cache=True).logits[:, : targets.shape[1]]
        parts.append(gather_log_probs(logits, targets)[0].cpu())
    return torch.cat(parts)


def likeliest(scores: Sequence[float] | np.ndarray, dtype: str, option: str = "--dtype") -> int:
    """Return the index of the highest score; of equal scores, the first.

    Raises:
        ValueError: a score is NaN. The message names the model's `dtype` and the `option` that changes it.
    """
    if np.isnan(scores).any():
        raise ValueError(f"The model's scores are NaN in {dtype}. Try another {option}.")
    return int(np.argmax(scores))


def batches(lengths: Mapping[K, int], batch_tokens: int) -> Iterator[list[K]]:
    """Group sequences of equal length into batches, longest first.

    A batch has at most `batch_tokens` tokens, or one sequence. Without padding, no result depends on the other
    sequences of a batch.

    Args:
        lengths: number of tokens of each sequence, by any key.
        batch_tokens: maximum number of tokens in a batch.
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
    """Compute the log-likelihoods of continuations given their contexts.

    Trailing whitespace of a context counts as part of its continuation.

    Args:
        loaded: the model and its tokenizer.
        pairs: context and continuation, by any key.
        batch_tokens: maximum number of tokens in a batch.

    Yields:
        Key, and the sum of the log-probabilities of the continuation's tokens.
    """
    rows: dict[K, list[int]] = {}
    starts: dict[K, int] = {}
    for key, (context, continuation) in pairs.items():
        before = loaded.prefix + loaded.encode(context.rstrip())
        rows[key] = loaded.prefix + loaded.encode(context + continuation)
        starts[key] = max(1, min(len(before), len(rows[key]) - 1))  # a model does not predict the first token
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
    """Generate greedy completions of prompts, batch by batch.

    Args:
        loaded: the model and its tokenizer.
        prompts: token ids, by any key.
        max_new_tokens: maximum number of tokens in a completion.
        batch_tokens: maximum number of prompt tokens in a batch.
        stop: strings before the first of which a completion ends.

    Yields:
        Key, and the completion's text without special tokens.
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
            repetition_penalty=1.0,  # a checkpoint's own settings may penalize the repetition that a probe asks for
            no_repeat_ngram_size=0,
            pad_token_id=pad,
            stopping_criteria=[ended] if stop else None,
        )
        for key, row in zip(keys, generated[:, ids.shape[1] :], strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            yield key, text[: min((at for string in stop if (at := text.find(string)) >= 0), default=None)]
