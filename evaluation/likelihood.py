# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of texts and of continuations, and greedy completions, in bounded memory."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from diffllama.evaluation.models import LoadedModel


CHUNK = 1024
"""So many tokens of a long text go through the model at once, so that logits are never [n, vocabulary]."""


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for the model.

    Raises:
        ValueError: the model keeps a state of its own, without which a later chunk forgets the earlier ones.
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
    """Log-probability of every token but the first, given all before it.

    Args:
        model: a causal language model.
        ids: token ids [1, n], as long as the cache fits into memory.
        chunk: how many of them are computed at once.

    Returns:
        [n - 1] in float32, on the CPU.

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
    """Index of the highest score, the first of equal ones.

    Args:
        scores: some may be minus infinity.
        dtype: in which the model computed them. option: of the command line, which chooses another.

    Raises:
        ValueError: a score is NaN, of which no other is higher.
    """
    if np.isnan(scores).any():
        raise ValueError(f"The model's scores are not numbers (NaN) in {dtype}. Try another {option}.")
    return int(np.argmax(scores))


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of sequences of equal length together, longest first, at most `batch_tokens` tokens (or one sequence).

    Equal lengths need no padding: nothing that a sequence is given depends on its neighbours.
    """
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for length in sorted(by_length, reverse=True):
        rows = max(1, batch_tokens // max(1, length))
        indices = by_length[length]
        yield from (indices[start : start + rows] for start in range(0, len(indices), rows))


@torch.inference_mode()
def continuation_log_probs(
    loaded: LoadedModel, pairs: Sequence[tuple[str, str]], batch_tokens: int = 4096
) -> Iterator[tuple[int, float]]:
    """Log-likelihood of continuations.

    Args:
        loaded: model and tokenizer.
        pairs: contexts and continuations; a space at a context's end is counted to its continuation.
        batch_tokens: at most so many tokens at once.

    Yields:
        Index of the pair and the sum of the log-probabilities of its continuation's tokens, batch by batch.
    """
    rows, starts = [], []
    for context, continuation in pairs:
        stripped = context.rstrip()
        before = loaded.prefix + loaded.encode(stripped)
        whole = loaded.prefix + loaded.encode(stripped + context[len(stripped) :] + continuation)
        rows.append(whole)
        starts.append(max(1, min(len(before), len(whole) - 1)))  # a model says nothing about its first token
    for indices in batches([len(row) for row in rows], batch_tokens):
        ids = torch.tensor([rows[index] for index in indices], device=loaded.model.device)
        first = min(starts[index] for index in indices)
        logits = loaded.model(ids, use_cache=False, logits_to_keep=ids.shape[1] - first + 1).logits[:, :-1]
        scores = gather_log_probs(logits, ids[:, first:])
        for row, index in enumerate(indices):
            yield index, scores[row, starts[index] - first :].sum().item()


class Stop(StoppingCriteria):
    """Ends each row in whose text there is one of some strings.

    Transformers' own criterion fails with tokenizers of whole words, and counts a string that the prompt begins.

    Args:
        strings: at which a row ends.
        tokenizer: makes text of the tokens.
        start: how many tokens the prompts have.
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase, start: int) -> None:
        self.strings, self.tokenizer, self.start = strings, tokenizer, start

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Which rows end: [b]."""
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :], skip_special_tokens=True)
        ended = [any(string in text for string in self.strings) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


@torch.inference_mode()
def completions(
    loaded: LoadedModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch_tokens: int = 4096,
    stop: Sequence[str] = (),
) -> Iterator[tuple[int, str]]:
    """Greedy completions of prompts, batch by batch.

    Args:
        loaded: model and tokenizer.
        prompts: their token ids.
        max_new_tokens: where a completion ends that the model does not end.
        batch_tokens: at most so many tokens of prompts at once.
        stop: strings at the first of which a completion ends, and which are no part of it.

    Yields:
        Index of the prompt and the text that follows it, without special tokens.
    """
    tokenizer = loaded.tokenizer
    pad = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    for indices in batches([len(prompt) for prompt in prompts], batch_tokens):
        ids = torch.tensor([prompts[index] for index in indices], device=loaded.model.device)
        generated = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,  # a checkpoint's own settings may punish the repetition that a probe asks for
            no_repeat_ngram_size=0,
            pad_token_id=pad,
            stopping_criteria=[Stop(stop, tokenizer, ids.shape[1])] if stop else None,
        )
        for index, row in zip(indices, generated[:, ids.shape[1] :], strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            yield index, text[: min((at for string in stop if (at := text.find(string)) >= 0), default=None)]
