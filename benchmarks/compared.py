# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of models compare, and how they tell where they ran."""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM
from diffllama.configuration import SHARED_FIELDS, baseline


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("llama", "transformers diffllama", "ours V1", "ours V2")


def build(name: str, width: int = 768, layers: int = 6) -> PreTrainedModel:
    """A model to compare, in float32 with sdpa.

    All have the same hidden width and keys and values of the same size: Llama heads of 64 (12 of them by default), ours
    half as many differential heads (V1 d = 64; V2 heads of width 64 with two queries, as many as Llama's).
    """
    if width % 128:
        raise ValueError(f"`width` must be a multiple of 128, got {width}.")
    heads = width // 64
    size = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": layers, "vocab_size": 4096}
    size |= {"max_position_embeddings": 16384, "rms_norm_eps": 1e-5}
    v1 = DiffLlamaConfig(**size, num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=128)
    torch.manual_seed(0)
    if name == "llama":
        model = transformers.LlamaForCausalLM._from_config(baseline(v1), attn_implementation="sdpa")
    elif name == "transformers diffllama":
        theirs = transformers.DiffLlamaConfig(
            **{field: getattr(v1, field) for field in SHARED_FIELDS if field not in ("mlp_bias", "dtype")},
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=64,
        )
        model = transformers.DiffLlamaForCausalLM._from_config(theirs, attn_implementation="sdpa")
    else:
        v2 = DiffLlamaConfig(
            **size, diff_variant="v2", num_attention_heads=2 * heads, num_key_value_heads=heads, head_dim=64
        )
        config = {"ours V1": v1, "ours V2": v2}[name]
        model = DiffLlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return model.to(DEVICE).eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(4096, (batch, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def seconds(step: Callable[[], object]) -> float:
    """Wall-clock time of one step."""
    start = time.perf_counter()
    step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark of models."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--width", type=int, default=768, help="hidden width, a multiple of 128")
    made.add_argument("--layers", type=int, default=6, help="layers of every model")
    made.add_argument("--rounds", type=int, default=7, help="how often each model is timed in turn")
    made.add_argument("--json", type=Path, help="write the results here too")
    return made


def machine(arguments: argparse.Namespace) -> dict[str, object]:
    """Where a benchmark ran, and its options."""
    return {
        "machine": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: value for name, value in vars(arguments).items() if name != "json"},
    }
