import math
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_scheduler

from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM
from diffllama.configuration import SHARED_FIELDS, baseline, preset, preset_names, recipe, recipe_names
from support.tiny_models import tiny_config


# Appendix E, table 10: hidden width, layers, differential heads; and millions of parameters, rounded down
SCALING_STUDY = {
    "830m": (1536, 24, 8, 833),
    "1.4b": (2048, 24, 8, 1413),
    "2.8b": (2560, 32, 10, 2773),
    "6.8b": (4096, 32, 16, 6853),
    "13.1b": (5120, 40, 20, 13097),
}

# Parameters and tensors of published checkpoints, layers, signal heads and the width of their outputs together
PUBLISHED = {
    "motif-2.6b": (2_597_218_432, 514, 32, 8, 2048),
    "motif-2-12.7b": (12_703_860_896, 643, 40, 32, 8192),
    "perdix-1.1b": (1_107_387_984, 302, 20, 16, 2048),
}


def parameters(config: DiffLlamaConfig | LlamaConfig) -> dict[str, nn.Parameter]:
    """Return the model's parameters on the meta device; tied parameters count once."""
    model_class = DiffLlamaForCausalLM if isinstance(config, DiffLlamaConfig) else LlamaForCausalLM
    with torch.device("meta"):
        return dict(model_class(config).named_parameters())


def count(config: DiffLlamaConfig | LlamaConfig) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in parameters(config).values())


def test_there_is_a_preset_for_every_model_of_the_paper_and_published_ones() -> None:
    assert preset_names() == ["3b", "3b-v1-4to1", "3b-v2-4to1", *SCALING_STUDY, *PUBLISHED]


def test_3b_has_the_dimensions_and_parameters_of_table_9() -> None:
    config = preset("3b")
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (28, 3072, 8192)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (24, 12, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (100288, 4096)
    assert config.tie_word_embeddings is False
    inner = {name: p for name, p in parameters(config).items() if "embed" not in name and "lm_head" not in name}
    assert round(sum(p.numel() for p in inner.values()) / 1e9, 2) == 3.17


@pytest.mark.parametrize(("name", "row"), SCALING_STUDY.items())
def test_scaling_study_has_the_dimensions_and_parameter_counts_of_table_10(
    name: str, row: tuple[int, int, int, int]
) -> None:
    width, layers, heads, millions = row
    config = preset(name)
    assert (config.hidden_size, config.num_hidden_layers) == (width, layers)
    assert (config.num_attention_heads, config.num_key_value_heads) == (2 * heads, heads)
    assert heads * config.head_dim == width
    assert abs(config.intermediate_size - 8 / 3 * width) <= 1
    assert config.max_position_embeddings == 2048
    assert int(count(config) / 1e6) == millions


@pytest.mark.parametrize("name", ["3b", *SCALING_STUDY])
def test_every_preset_is_the_papers_architecture_with_a_baseline_of_twice_the_heads(name: str) -> None:
    config = preset(name)
    assert (config.diff_variant, config.lambda_init, config.lambda_std_dev) == ("v1", "exponential", 0.1)
    assert config.head_norm is config.head_norm_affine is True
    assert (config.rms_norm_eps, config.hidden_act) == (1e-5, "silu")
    assert config.bos_token_id is config.eos_token_id is None

    llama = baseline(config)
    assert type(llama) is LlamaConfig
    assert (llama.num_attention_heads, llama.head_dim) == (config.num_attention_heads, config.head_dim // 2)
    assert llama.num_key_value_heads == llama.num_attention_heads
    assert {field: getattr(llama, field) for field in SHARED_FIELDS} == {
        field: getattr(config, field) for field in SHARED_FIELDS
    }
    assert count(config) - count(llama) == config.num_hidden_layers * 3 * config.head_dim  # λ vectors and head norm


@pytest.mark.parametrize(("name", "sizes"), [("3b-v1-4to1", (48, 12, 128, 7168)), ("3b-v2-4to1", (24, 6, 128, 9728))])
def test_grouped_3b_has_the_parameters_of_the_3b_and_of_its_own_baseline(name: str, sizes: tuple[int, ...]) -> None:
    config, llama = preset(name), baseline(preset(name))
    assert (config.signals_per_noise, config.num_noise_heads, config.num_signal_heads) == (4, 6, 24)
    assert (config.rotary_dim, config.hidden_size, config.num_hidden_layers) == (128, 3072, 28)
    for other in (preset("3b"), llama):
        assert count(config) == pytest.approx(count(other), rel=1e-3)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim, llama.intermediate_size) == sizes


@pytest.mark.parametrize(("name", "row"), PUBLISHED.items())
def test_published_models_have_their_parameters_and_a_baseline_with_as_many(name: str, row: tuple[int, ...]) -> None:
    config, tensors = preset(name), parameters(preset(name))
    outputs = tensors["model.layers.0.self_attn.o_proj.weight"].shape[1]
    assert (count(config), len(tensors), config.num_hidden_layers, config.num_signal_heads, outputs) == row
    llama = baseline(config)
    assert llama.hidden_act == "silu"
    assert count(llama) == pytest.approx(count(config), rel=1e-4)


@pytest.mark.parametrize("name", ["motif-2.6b", "motif-2-12.7b"])
def test_motif_has_the_lambda_init_of_the_layer_before(name: str) -> None:
    config = preset(name)
    assert config.lambda_init == [0.8 - 0.6 * math.exp(-0.3 * (i - 1)) for i in range(config.num_hidden_layers)]
    assert config.lambda_init[:2] == pytest.approx([-0.0099, 0.2], abs=1e-4)
    assert preset(name, num_hidden_layers=3).lambda_init == config.lambda_init[:3]


@pytest.mark.parametrize("name", ["7b", "3B", "", "common", "motif", None])
def test_unknown_preset_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ValueError, match=repr(name)) as error:
        preset(name)
    assert all(known in str(error.value) for known in preset_names())


def test_fields_of_a_preset_can_be_set_otherwise() -> None:
    config = preset("830m", vocab_size=32000, diff_variant="v2", num_key_value_heads=2, tie_word_embeddings=False)
    assert (config.vocab_size, config.diff_variant, config.num_key_value_heads) == (32000, "v2", 2)
    assert (config.hidden_size, config.tie_word_embeddings) == (1536, False)
    assert preset("830m") == preset("830m") != config
    assert preset("830m").vocab_size == 100288
    with pytest.raises(StrictDataclassError, match="num_key_value_heads"):
        preset("830m", num_key_value_heads=3)


@pytest.mark.parametrize(
    ("fields", "extra"),
    [
        ({}, "λ and norm"),
        ({"num_key_value_heads": 4}, "λ and norm"),
        ({"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}, "λ and norm"),
        ({"head_dim": 24, "tie_word_embeddings": True}, "λ and norm"),
        ({"head_norm_affine": False}, "λ"),
        ({"head_norm": False}, "λ"),
        ({"num_attention_heads": 10, "num_noise_heads": 2}, "λ and norm"),
        ({"gated_mlp": False}, "λ and norm"),
        ({"hidden_act": "poly_norm"}, "λ, norm and PolyNorm"),
    ],
    ids=str,
)
def test_v1_has_the_parameters_of_its_baseline_and_those_of_lambda_norms_and_activation(
    fields: dict[str, Any], extra: str
) -> None:
    config = tiny_config("v1", **fields)
    each_layer = 4 * config.head_dim // 2 + config.head_dim * (" norm" in extra) + 4 * ("PolyNorm" in extra)
    assert count(config) - count(baseline(config)) == config.num_hidden_layers * each_layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_v2_has_the_parameters_of_its_baseline_and_a_second_query_and_lambda_projection(
    key_value_heads: int, bias: bool
) -> None:
    config = tiny_config("v2", num_key_value_heads=key_value_heads, attention_bias=bias)
    llama = baseline(config)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim) == (4, key_value_heads, 16)
    each_layer = 4 * 16 * (config.hidden_size + bias) + 4 * config.hidden_size
    assert count(config) - count(llama) == config.num_hidden_layers * each_layer


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_keys_and_values_of_a_model_and_its_baseline_take_the_same_room(variant: str) -> None:
    config = tiny_config(variant)
    llama = baseline(config)
    assert llama.num_key_value_heads * llama.head_dim == config.num_key_value_heads * config.head_dim


def test_baseline_has_the_fields_that_are_shared() -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    shared = {
        "vocab_size": 50,
        "rope_parameters": rope,
        "dtype": torch.bfloat16,
        "mlp_bias": True,
        "hidden_act": "gelu",
    }
    shared |= {"pad_token_id": 3, "eos_token_id": [1, 2], "attention_dropout": 0.1, "use_cache": False}
    llama = baseline(tiny_config(**shared))
    assert {field: getattr(llama, field) for field in shared} == shared


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_out_bias": True},
        {"attention_bias": True, "attention_out_bias": False},
        {"use_qk_norm": True},
        {"no_rope_layers": [1, 0]},
        {"sliding_window": 8},
    ],
    ids=str,
)
def test_model_with_what_no_llama_has_has_no_baseline(fields: dict[str, Any]) -> None:
    field, value = list(fields.items())[-1]
    with pytest.raises(ValueError, match=f"`{field}` must be .+, got ") as error:
        baseline(tiny_config(**fields))
    assert str(error.value).endswith(f"got {value}.")


def test_changing_a_baseline_leaves_the_model_as_it_was() -> None:
    config = tiny_config(eos_token_id=[1, 2])
    llama = baseline(config)
    llama.rope_parameters["rope_theta"] = 1.0
    llama.eos_token_id.append(3)
    assert (config.rope_parameters["rope_theta"], config.eos_token_id) == (10000.0, [1, 2])


# Sections 3.1 to 3.3, appendices D and E: tokens of a sequence and a step, β2, highest learning rate, warm-up, decay,
# billions of tokens in all, rounded
RECIPES = {
    "3b": (4096, 2**22, 0.95, 3.2e-4, 1000, 0.1, 1000.0),
    "scaling": (2048, 2**18, 0.98, 1.5e-4, 375, 0.05, 10.5),
    "scaling-large": (2048, 2**18, 0.98, 7.5e-5, 375, 0.05, 10.5),
    "long-context": (65536, 2**22, 0.95, 8e-5, 0, 0.1, 1.5),
}


def test_there_is_a_recipe_for_every_training_of_the_paper() -> None:
    assert recipe_names() == list(RECIPES)
    with pytest.raises(ValueError, match=r"No recipe '4b'\. Known: 3b, scaling"):
        recipe("4b")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_the_papers_and_transformers_takes_it(name: str, tmp_path: Path) -> None:
    found = recipe(name)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **found["training"])
    tokens = found["tokens_per_step"]
    assert RECIPES[name] == (
        found["sequence_length"], tokens, arguments.adam_beta2, arguments.learning_rate, arguments.warmup_steps,
        arguments.weight_decay, round(arguments.max_steps * tokens / 1e9, 1),
    )  # fmt: skip
    assert (arguments.adam_beta1, arguments.optim, arguments.bf16) == (0.9, "adamw_torch", True)


def test_3b_learning_rate_decays_linearly_to_its_end() -> None:
    training = recipe("3b")["training"]
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=training["learning_rate"])
    schedule = get_scheduler(
        training["lr_scheduler_type"], optimizer, training["warmup_steps"], training["max_steps"],
        scheduler_specific_kwargs=training["lr_scheduler_kwargs"],
    )  # fmt: skip
    (rate,) = schedule.lr_lambdas
    start, end, steps = 3.2e-4, 1.28e-5, training["max_steps"]
    for step, expected in ((500, start / 2), (1000, start), ((1000 + steps) // 2, (start + end) / 2), (steps, end)):
        assert rate(step) * start == pytest.approx(expected, rel=1e-4)


def test_long_context_recipe_stretches_the_3b_model() -> None:
    config = preset("3b", **recipe("long-context")["model"])
    assert config.max_position_embeddings == 65536
    assert config.rope_parameters["rope_theta"] == 640_000


def test_changed_recipe_is_not_remembered() -> None:
    recipe("3b")["training"]["learning_rate"] = 1.0
    assert recipe("3b")["training"]["learning_rate"] == 3.2e-4


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_lambda_is_decayed_like_any_weight_and_norms_are_not(variant: str, tmp_path: Path) -> None:
    """microsoft/unilm's modules exempt nothing from weight decay, not even norms."""
    model = DiffLlamaForCausalLM(tiny_config(variant))
    decayed = set(Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True)).get_decay_parameter_names(model))
    exempt = {name for name, _ in model.named_parameters()} - decayed
    assert {name for name, _ in model.named_parameters() if "lambda" in name} <= decayed
    assert exempt == {name for name, _ in model.named_parameters() if "norm" in name}
