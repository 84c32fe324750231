# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Shows the error of a conversion without one of its steps: the table of docs/layouts.md.

Usage: python examples/wrong_layouts.py

Converts small random models (float32, 4 layers, hidden width 256, 4 differential heads, 2 key/value heads) with the
weight maps as they are, then with one operation left out, and prints the error of the logits.
"""

from collections.abc import Callable

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig

from diffllama import DiffLlamaConfig
from diffllama.checkpoints.models import meta_model
from diffllama.configuration import SHARED_FIELDS, baseline
from diffllama.conversion import llama, operations, perdix, transformers_diffllama, unilm
from diffllama.conversion.verification import measure, token_ids
from diffllama.conversion.weight_map import Operation, Rule, WeightMap, inverse, plan


Weights = dict[str, torch.Tensor]
Logits = Callable[[Weights], torch.Tensor]

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "rms_norm_eps": 1e-5}
V1 = DiffLlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
V2 = DiffLlamaConfig(**SIZES, diff_variant="v2", num_attention_heads=8, num_key_value_heads=2, head_dim=64)
UNGATED = DiffLlamaConfig(**SIZES, num_attention_heads=8, head_dim=64, hidden_act="poly_norm", gated_mlp=False)
PLAIN_V1 = unilm.convert_config(V1, "repeated")
THEIRS = transformers.DiffLlamaConfig(
    **{field: getattr(V1, field) for field in SHARED_FIELDS if field not in ("mlp_bias", "dtype")},
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
)


def random_weights(config: PreTrainedConfig, weight_map: WeightMap | None = None) -> Weights:
    """Return random values for the tensors of a model or of a conversion: norms around 1, all else around 0."""
    tensors = dict(meta_model(config).state_dict())
    if weight_map is not None:
        tensors = converted(tensors, weight_map, config)
    generator = torch.Generator().manual_seed(0)
    return {
        name: ("norm" in name or "subln" in name) + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }


def model_logits(config: PreTrainedConfig) -> Logits:
    """Return a function that computes the logits of a transformers model from weights."""

    @torch.inference_mode()
    def logits(weights: Weights) -> torch.Tensor:
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.load_state_dict(weights)
        return model(token_ids(512, 32)).logits

    return logits


def unilm_logits(config: DiffLlamaConfig, gqa_layout: unilm.GqaLayout) -> Logits:
    """Return a function that computes unilm's formulas from weights."""
    return lambda weights: unilm.reference_outputs(weights, config, gqa_layout)[0]


def without(weight_map: WeightMap, operation: Operation) -> WeightMap:
    """Return a weight map without an operation."""
    return {
        name: Rule(rule.target, tuple(o for o in rule.operations if o is not operation), rule.others)
        if isinstance(rule, Rule)
        else rule
        for name, rule in weight_map.items()
    }


def heads_in_blocks(tensor: torch.Tensor, config: DiffLlamaConfig) -> torch.Tensor:
    """Return a wrong `append_noise_queries`: all heads once, then all heads again."""
    return torch.cat((tensor, tensor))


def converted(weights: Weights, weight_map: WeightMap, config: DiffLlamaConfig) -> Weights:
    """Apply a weight map, with our configuration."""
    steps = plan({name: tensor.to("meta") for name, tensor in weights.items()}, weight_map, config)
    return {name: step.make(*(weights[needed] for needed in step.inputs)) for name, step in steps.items()}


def rows() -> list[tuple[str, str, float, float]]:
    """Return for each conversion and omitted step the largest difference and the share of other top tokens."""
    table = []

    def add(
        conversion: str, weights: Weights, source: Logits, result: Logits, config: DiffLlamaConfig,
        maps: dict[str, WeightMap], new: Weights | None = None,
    ) -> None:  # fmt: skip
        expected = source(weights)
        for left_out, weight_map in maps.items():
            got = result(converted(weights, weight_map, config) | (new or {}))
            difference = measure([expected], [got], None, "logits")
            share = difference.max_difference / difference.largest_output
            table.append((conversion, left_out, share, 1 - difference.same_top_token))

    source, right = baseline(V2), llama.WEIGHT_MAPS["v2"]
    query = "model.layers.{i}.self_attn.q_proj.weight"
    add(
        "llama → V2", random_weights(source), model_logits(source), model_logits(V2), V2,
        {"nothing": right, "doubling o_proj": without(right, operations.add_group_mean),
         "neighbours: heads copied in blocks": {**right, query: Rule(query, (heads_in_blocks,))}},
        {name: make() for name, make in llama.new_weights(V2).items()},
    )  # fmt: skip
    right = transformers_diffllama.FROM_TRANSFORMERS
    ours = transformers_diffllama.convert_config(THEIRS)
    add(
        "transformers → V1", random_weights(THEIRS), model_logits(THEIRS), model_logits(ours), ours,
        {"nothing": right, "halves → neighbours": without(right, operations.neighbours_from_halves)},
    )  # fmt: skip
    right = transformers_diffllama.TO_TRANSFORMERS_WITH_NORM
    add(
        "V1 → transformers", random_weights(V1), model_logits(V1), model_logits(THEIRS), V1,
        {"nothing": right, "neighbours → halves": without(right, operations.halves_from_neighbours),
         "folding the head norm": without(right, operations.fold_head_norm)},
    )  # fmt: skip
    for config, gqa_layout, title in (
        (V1, "grouped", "unilm-v1 → V1"), (V1, "repeated", "unilm-v1, repeated keys → V1"),
        (V2, "grouped", "unilm-v2 → V2"),
    ):  # fmt: skip
        right = unilm.FROM_UNILM[config.diff_variant, gqa_layout]
        maps = {"nothing": right, "interleaved → half": without(right, operations.half_from_interleaved)}
        ours = PLAIN_V1 if gqa_layout == "repeated" else config
        weights = random_weights(config, unilm.TO_UNILM[config.diff_variant])
        expected = unilm_logits(config, gqa_layout)
        add(title, weights, expected, model_logits(ours), ours, maps)
        if gqa_layout == "repeated":
            wrong = {"its keys: taken for grouped ones": unilm.FROM_UNILM["v1", "grouped"]}
            add(title, weights, expected, model_logits(V1), V1, wrong)
    right = perdix.FROM_PERDIX
    add(
        "perdix → V1", random_weights(UNGATED, inverse(right)),
        lambda weights: perdix.logits(token_ids(512, 32), weights, UNGATED), model_logits(UNGATED), UNGATED,
        {"nothing": right, "interleaved → half": without(right, operations.half_from_interleaved),
         "PolyNorm's order": without(right, operations.flip)},
    )  # fmt: skip
    return table


def main() -> None:
    """Print the table."""
    table = Table("conversion", "left out", "largest difference / largest logit", "other top token", width=110)
    for conversion, left_out, difference, other in rows():
        table.add_row(conversion, left_out, f"{difference:.1e}", f"{other:.0%}")
    Console(width=112).print(table)


if __name__ == "__main__":
    main()
