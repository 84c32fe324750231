import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DiffLlamaForCausalLM, LlamaConfig, PreTrainedConfig
from transformers import DiffLlamaConfig as TransformersDiffLlamaConfig

import diffllama
from diffllama import DiffLlamaConfig, convert
from diffllama.checkpoints.models import expected_tensors
from diffllama.conversion.transformers_diffllama import (
    FROM_TRANSFORMERS,
    convert_config,
    convert_config_back,
    weight_map_back,
)
from diffllama.conversion.weight_map import WeightMap, plan
from support.llama_checkpoints import SIZES, add_tokenizer, save_model, snapshot
from support.tiny_models import tiny_config, tokens


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 8},
    "groups-2": {"num_key_value_heads": 4},
    "groups-4-tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "biases": {"num_key_value_heads": 4, "attention_bias": True},
    "narrow-heads": {"head_dim": 6, "num_key_value_heads": 4},
    "other-epsilon": {"num_key_value_heads": 4, "rms_norm_eps": 1e-2},
    "llama3": {"num_key_value_heads": 2, "max_position_embeddings": 256, "rope_parameters": LLAMA3},
}
"""Fields of transformers' configuration."""

OURS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "groups-2": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "groups-4-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "no-weight-in-norm": {"head_norm_affine": False},
    "other-epsilon": {"rms_norm_eps": 1e-2, "head_norm_eps": 1e-4},
}
convert_from = partial(convert, source="transformers")
convert_to = partial(convert, target="transformers")


def theirs(folder: Path, **fields: Any) -> Path:
    config = TransformersDiffLlamaConfig(**(SIZES | {"num_attention_heads": 8, "rms_norm_eps": 1e-5} | fields))
    return save_model(folder, config, std=0.1)


def ours(folder: Path, **fields: Any) -> Path:
    return save_model(folder, tiny_config(fields.pop("diff_variant", "v1"), **fields), std=0.1)


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def logits(folder: Path, dtype: torch.dtype = torch.float32, implementation: str = "sdpa") -> torch.Tensor:
    """Compute the logits of two rows, the second one padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=implementation).eval()
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    with torch.no_grad():
        return model(input_ids=tokens(2, 24), attention_mask=mask).logits[mask.bool()]


def assert_same_logits(source: Path, folder: Path) -> None:
    for implementation in ("eager", "sdpa"):
        expected, got = (logits(place, implementation=implementation) for place in (source, folder))
        assert expected.std() > 0.1
        assert (got - expected).abs().max() <= 1e-5


def assert_verified(folder: Path, **formats: str) -> None:
    record = json.loads((folder / "conversion.json").read_text())
    assert {side: record[side]["format"] for side in formats} == formats
    assert (record["verification"]["passed"], record["verification"]["tolerance"]) == (True, 1e-5)
    assert record["verification"]["max_difference"] <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_theirs_becomes_ours_with_the_same_logits(case: str, tmp_path: Path) -> None:
    source = theirs(tmp_path / "src", **CASES[case])
    folder = convert_from(source, tmp_path / "dest")
    loaded = [type(AutoModelForCausalLM.from_pretrained(place)) for place in (source, folder)]
    assert loaded == [DiffLlamaForCausalLM, diffllama.DiffLlamaForCausalLM]
    assert_same_logits(source, folder)
    assert_verified(folder, source="transformers", result="diff_llama")
    assert "trust_remote_code=True" in (folder / "README.md").read_text()


@pytest.mark.parametrize("case", OURS)
def test_ours_becomes_theirs_with_the_same_logits_and_without_code(case: str, tmp_path: Path) -> None:
    source = ours(tmp_path / "src", **OURS[case])
    add_tokenizer(source)
    folder = convert_to(source, tmp_path / "dest")
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is DiffLlamaForCausalLM
    assert_same_logits(source, folder)
    assert_verified(folder, source="diff_llama", result="transformers")
    assert "trust_remote_code=True" not in (folder / "README.md").read_text()
    assert not list(folder.glob("*.py"))
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("diffllama", ["DiffLlamaForCausalLM"])
    assert "auto_map" not in config


@pytest.mark.parametrize(
    ("case", "dtype", "shards"),
    [
        ("mha", torch.float64, {}),
        ("groups-2", torch.bfloat16, {"max_shard_size": "30KB"}),
        ("groups-2", torch.float32, {}),
        ("groups-4-tied", torch.float32, {"max_shard_size": "30KB"}),
        ("biases", torch.float16, {}),
        ("narrow-heads", torch.bfloat16, {}),
        ("other-epsilon", torch.bfloat16, {}),
    ],
    ids=str,
)
def test_conversion_there_and_back_gives_the_same_bits(
    case: str, dtype: torch.dtype, shards: dict[str, Any], tmp_path: Path
) -> None:
    source = theirs(tmp_path / "src", **CASES[case])
    DiffLlamaForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(tmp_path / "stored", **shards)
    there = convert_from(tmp_path / "stored", tmp_path / "there", verify=False, **shards)
    back = convert_to(there, tmp_path / "back", verify=False)
    old, new = map(all_weights, (source, back))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name].to(dtype), new[name]) for name in old)
    configs = [TransformersDiffLlamaConfig.from_pretrained(place).to_dict() for place in (tmp_path / "stored", back)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"diff_variant": "v2"}, "converted to transformers' diffllama: `diff_variant` must be 'v1', got 'v2'"),
        ({"lambda_init": 0.5}, "`lambda_init` must be 'exponential', got 0.5"),
        ({"num_noise_heads": 2}, "`num_noise_heads` must be 4, got 2"),
        ({"hidden_act": "poly_norm"}, "`hidden_act` must be 'silu', got 'poly_norm'"),
        ({"gated_mlp": False}, "`gated_mlp` must be True, got False"),
        ({"head_norm": False}, "`head_norm` must be True, got False"),
        ({"mlp_bias": True}, "`mlp_bias` must be False, got True"),
        ({"attention_out_bias": True}, "`attention_out_bias` must be False, got True"),
        ({"use_qk_norm": True}, "`use_qk_norm` must be False, got True"),
        ({"no_rope_layers": [1, 0]}, r"`no_rope_layers` must be None, got \[1, 0\]"),
        ({"sliding_window": 8}, "`sliding_window` must be None, got 8"),
        ({"attention_dropout": 0.1}, "`attention_dropout` must be 0.0, got 0.1"),
        ({"head_norm": False, "mlp_bias": True}, "`head_norm` must be True.*; `mlp_bias` must be False"),
    ],
    ids=str,
)
def test_what_theirs_lacks_is_refused_by_name(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = ours(tmp_path / "src", **fields)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=named):
        convert_to(source, tmp_path / "dest")
    assert snapshot(tmp_path) == before


def test_diffllama_1b_has_every_tensor() -> None:
    """It has the sizes of kajuma/DiffLlama-1B."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    rope = LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}
    source = TransformersDiffLlamaConfig(
        **sizes, **heads, rope_parameters=rope, max_position_embeddings=131072, rms_norm_eps=1e-5
    )
    config = convert_config(source)
    result = planned(expected_tensors(source), FROM_TRANSFORMERS, config)
    assert shapes(result) == shapes(expected_tensors(config))
    assert (config.num_key_value_heads, config.head_dim, config.rope_parameters) == (4, 128, rope)


@pytest.mark.parametrize("heads", [(7, 7), (8, 1)], ids=str)
def test_heads_that_make_no_pairs_are_refused(heads: tuple[int, int]) -> None:
    fields = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 8}
    config = TransformersDiffLlamaConfig(**(SIZES | fields))
    with pytest.raises(ValueError, match=rf"must be even, got {heads[0]} and {heads[1]}"):
        convert_config(config)


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), tiny_config()], ids=lambda config: config.model_type)
def test_another_model_is_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    source = save_model(tmp_path / "src", config)
    with pytest.raises(ValueError, match=f"must be one of 'diffllama', got '{config.model_type}'"):
        convert_from(source, tmp_path / "dest")


def planned(
    tensors: dict[str, torch.Tensor], weight_map: WeightMap, config: DiffLlamaConfig
) -> dict[str, torch.Tensor]:
    return {name: step.result for name, step in plan(tensors, weight_map, config).items()}


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    pairs=st.integers(1, 3),
    groups=st.integers(1, 3),
    d=st.sampled_from([2, 4, 6]),
    hidden=st.integers(1, 9),
    bias=st.booleans(),
    tied=st.booleans(),
    affine=st.booleans(),
)
def test_maps_make_every_tensor_for_all_shapes(
    pairs: int, groups: int, d: int, hidden: int, bias: bool, tied: bool, affine: bool
) -> None:
    sizes = {"num_key_value_heads": pairs, "num_attention_heads": 2 * pairs * groups, "head_dim": 2 * d}
    fields = {"hidden_size": hidden, "attention_bias": bias, "tie_word_embeddings": tied, "head_norm_affine": affine}
    config = tiny_config("v1", **sizes, **fields)
    back = convert_config_back(config)
    there = planned(expected_tensors(config), weight_map_back(config), config)
    assert shapes(there) == shapes(expected_tensors(back))
    again = convert_config(back)
    here = planned(there, FROM_TRANSFORMERS, again)
    assert shapes(here) == shapes(expected_tensors(again))
