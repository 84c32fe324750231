"""Small models and inputs for several tests."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM


VARIANTS = ("v1", "v2")

GROUPED: dict[str, Any] = {"num_attention_heads": 6, "num_noise_heads": 2, "hidden_act": "poly_norm"}
"""Fields with which a tiny model of any depth has two signals for each noise, and PolyNorm."""

EVERY_FEATURE: dict[str, Any] = {
    **GROUPED,
    "attention_out_bias": True,
    "use_qk_norm": True,
    "no_rope_layers": [0, 1],
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "lambda_init": [-0.01, 0.2],
    "head_norm_eps": 1e-3,
}
"""Fields with which a tiny model has all that is optional in a layer, each in one of its two layers or in both."""


def tiny_config(variant: str = "v1", **fields: Any) -> DiffLlamaConfig:
    """Return a configuration of two layers, four differential heads of width 16 and two key/value heads."""
    defaults = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # larger than usual, so that attention is far from uniform
        "lambda_std_dev": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return DiffLlamaConfig(diff_variant=variant, **(defaults | fields))


def tiny_model(
    variant: str = "v1", dtype: torch.dtype = torch.float32, attn_implementation: str = "eager", **fields: Any
) -> DiffLlamaForCausalLM:
    """Return a language model in evaluation mode, with random weights that depend only on the arguments."""
    config = tiny_config(variant, **fields)
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    return model.to(dtype).eval()


def paged(pages: int, tokens_at_once: int, **settings: Any) -> ContinuousBatchingConfig:
    """Configure continuous batching with `pages` pages of 16 tokens; by default it takes all memory on a CPU."""
    page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # its older name
    batching = ContinuousBatchingConfig(
        num_blocks=pages, max_batch_tokens=tokens_at_once, use_cuda_graph=False, **{page: 16}, **settings
    )
    batching.auto_switch_to_flash = False  # even if flash-attn is installed
    return batching


def tokens(*shape: int, vocab_size: int = 97, seed: int = 0) -> torch.Tensor:
    """Return random token ids without the padding token 0."""
    return torch.randint(1, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 97 words, as many as the tiny models have, with left padding and a chat template."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", *(f"w{i}" for i in range(6, 97))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %} <|{{ message.role }}|> {{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %} <|assistant|>{% endif %}"
    )
    return tokenizer
