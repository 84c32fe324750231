"""Tiny models with random weights and a tokenizer, for probes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diffllama.evaluation.models import LoadedModel
from support.rule_based_lm import byte_tokenizer
from support.tiny_models import GROUPED, VARIANTS, tiny_model


KINDS = ("llama", *VARIANTS)


def tiny_loaded_model(kind: str) -> LoadedModel:
    """Return a Llama, a V2, or a V1 with two signals per noise, for texts of up to 1024 bytes, each of them a token."""
    tokenizer = byte_tokenizer()
    if kind in VARIANTS:
        fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, **(GROUPED if kind == "v1" else {})}
        model = tiny_model(kind, attn_implementation="sdpa", **fields)
    else:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            max_position_embeddings=1024,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    return LoadedModel(name=kind, model=model, tokenizer=tokenizer)
