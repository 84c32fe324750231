"""A language model that follows a rule, so that a probe's result is known."""

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Cache, GenerationMixin, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from diffllama.evaluation.models import LoadedModel


Rule = Callable[[list[int]], dict[int, float]]
"""Token ids so far -> logits of the next token; of those that it leaves out, minus infinity."""


class RuleBasedLM(PreTrainedModel, GenerationMixin):
    """Computes logits by a rule, with a KV cache or without."""

    config_class = LlamaConfig
    _supports_attention_backend = True

    def __init__(self, rule: Rule, vocab_size: int) -> None:
        super().__init__(LlamaConfig(vocab_size=vocab_size, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
        self.rule = rule
        self.place = torch.nn.Parameter(torch.zeros(1))
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: Cache | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if past_key_values is not None:  # token ids serve as keys
            keys, _ = past_key_values.update(*2 * [input_ids[:, None, :, None].float()], 0)
            before, ids = keys.shape[2] - input_ids.shape[1], keys[:, 0, :, 0].long()
        else:
            before, ids = 0, input_ids
        kept = range(input_ids.shape[1])[-logits_to_keep:]
        logits = torch.full((len(ids), len(kept), self.config.vocab_size), float("-inf"))
        for row, tokens in enumerate(ids.tolist()):
            for place, at in enumerate(kept):
                for token, logit in self.rule(tokens[: before + at + 1]).items():
                    logits[row, place, token] = logit
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, whose id is its place in the sorted alphabet, and EOS, 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")


def rule_based_lm(answer: Callable[[str], str], after: str) -> LoadedModel:
    """Return a model with byte tokens that answers, letter by letter, a text that ends in `after`, then EOS."""
    tokenizer = byte_tokenizer()

    def next_token(ids: list[int]) -> dict[int, float]:
        question, _, said = tokenizer.decode(ids).rpartition(after)
        rest = tokenizer.encode(answer(question + after))[len(tokenizer.encode(said)) :]
        return {rest[0] if rest else tokenizer.eos_token_id: 0.0}

    return LoadedModel(name="rule_based_lm", model=RuleBasedLM(next_token, len(tokenizer)).eval(), tokenizer=tokenizer)
