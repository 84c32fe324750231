import copy
import json
import logging
import math
import operator
import pickle
import re
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN

import diffllama
from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM, DiffLlamaForTokenClassification
from diffllama.modeling_diff import configuration_diffllama, modeling_diffllama
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_config, tiny_model, tokens


GEOMETRY = ("num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = (
    *GEOMETRY, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings",
)  # fmt: skip
SWITCHES = ("head_norm", "head_norm_affine", "attention_bias", "mlp_bias", "use_qk_norm", "use_cache")


def saved(config: DiffLlamaConfig, folder: Path) -> dict[str, Any]:
    """Return what `save_pretrained` writes to config.json."""
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def reread(config: DiffLlamaConfig) -> DiffLlamaConfig:
    """Return the configuration as reread from JSON, without the version of transformers."""
    result = DiffLlamaConfig.from_dict(json.loads(config.to_json_string()))
    assert result.transformers_version == transformers.__version__
    result.transformers_version = config.transformers_version
    return result


@pytest.fixture
def transformers_warnings() -> Iterator[list[str]]:
    """Warnings and errors that transformers logs during the test."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.Logger.warning_once.cache_clear()  # otherwise a warning of an earlier test is not repeated
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_defaults_are_those_of_llama_7b_with_half_as_many_heads_of_twice_the_width() -> None:
    config = DiffLlamaConfig()
    assert [getattr(config, name) for name in GEOMETRY] == [32, 16, 256]
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32000, 4096, 11008)
    assert (config.num_hidden_layers, config.max_position_embeddings) == (32, 2048)
    assert (config.diff_variant, config.lambda_init, config.lambda_std_dev) == ("v1", "exponential", 0.1)
    assert config.head_norm is config.head_norm_affine is config.use_cache is True
    assert config.attention_bias is config.attention_out_bias is config.mlp_bias is False
    assert config.tie_word_embeddings is config.use_qk_norm is False
    assert config.no_rope_layers is config.sliding_window is None
    assert config.layer_types == ["full_attention"] * 32
    assert (config.hidden_act, config.initializer_range, config.rms_norm_eps) == ("silu", 0.02, 1e-6)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)
    assert config.attention_dropout == 0.0
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.rotary_dim == 128


@pytest.mark.parametrize(
    ("fields", "geometry"),
    [
        ({}, [32, 16, 256]),
        ({"num_attention_heads": 24, "hidden_size": 3072}, [24, 12, 256]),
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}, [8, 2, 16]),
        ({"num_attention_heads": 2}, [2, 1, 4096]),
        ({"num_attention_heads": 40, "num_noise_heads": 8}, [40, 8, 128]),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_always_has_the_geometry_in_numbers(
    fields: dict[str, int], geometry: list[int], variant: str
) -> None:
    written = json.loads(DiffLlamaConfig(diff_variant=variant, **fields).to_json_string())
    assert [written[name] for name in GEOMETRY] == geometry
    assert written["num_noise_heads"] == fields.get("num_noise_heads", geometry[0] // 2)
    assert (written["model_type"], written["diff_variant"]) == ("diff_llama", variant)


@pytest.mark.parametrize(
    ("fields", "out_bias", "layer_types"),
    [
        ({}, False, ["full_attention"] * 2),
        ({"attention_bias": True}, True, ["full_attention"] * 2),
        ({"attention_bias": True, "attention_out_bias": False, "sliding_window": 8}, False, ["sliding_attention"] * 2),
        ({"attention_out_bias": True, "num_hidden_layers": 1, "sliding_window": 8}, True, ["sliding_attention"]),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 2}, False, ["full_attention"] * 2),
    ],
    ids=str,
)
def test_config_json_always_has_the_output_bias_and_the_type_of_every_layer(
    fields: dict[str, Any], out_bias: bool, layer_types: list[str]
) -> None:
    written = json.loads(tiny_config(**fields).to_json_string())
    assert (written["attention_out_bias"], written["layer_types"]) == (out_bias, layer_types)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lambda_init": 0.8, "lambda_std_dev": 0, "head_norm": False, "head_norm_affine": False},
        {"num_attention_heads": 10, "num_noise_heads": 2, "lambda_init": [-0.01, 1.2], "head_norm_eps": 1e-6},
        {"hidden_act": "poly_norm", "gated_mlp": False},
        {"eos_token_id": [1, 2], "pad_token_id": None, "attention_bias": True, "mlp_bias": True, "dtype": "bfloat16"},
        {"attention_dropout": 0.1, "tie_word_embeddings": True, "use_cache": False, "hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, "num_labels": 5},
        {"sliding_window": 8, "attention_bias": True, "attention_out_bias": False},
        EVERY_FEATURE,
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_folder_gives_back_the_configuration(variant: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(variant, **fields)
    assert reread(config) == config
    first = saved(config, tmp_path / "first")
    loaded = DiffLlamaConfig.from_pretrained(tmp_path / "first")
    for name in {*fields, *GEOMETRY, "diff_variant", "rope_parameters", "auto_map"}:
        assert getattr(loaded, name) == getattr(config, name)
    assert saved(loaded, tmp_path / "second") == first


LONGROPE = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

# fields -> parts of the message: field, value, rule
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(({name: value}, (f"`{name}`", f"got {value}", "from 1 to")) for name in SIZES for value in (0, -2)),
    *(({name: 2**31}, (f"`{name}`", "got 2147483648", "from 1 to")) for name in (*SIZES, "num_labels")),
    (
        {"num_attention_heads": 7},
        ("`num_attention_heads`", "got 7", "two or more times `num_noise_heads` (", "half of it"),
    ),
    ({"num_attention_heads": 1}, ("`num_attention_heads`", "got 1", "two or more times `num_noise_heads` (")),
    *(
        ({"num_noise_heads": noise}, ("`num_attention_heads`", "got 8", f"times `num_noise_heads` ({noise})"))
        for noise in (3, 8, 16)
    ),
    ({"num_noise_heads": 2, "num_key_value_heads": 4}, ("`num_key_value_heads`", "got 4", "`num_noise_heads` (2 of")),
    ({"num_noise_heads": 2.0}, ("'num_noise_heads'", "float (value: 2.0)", "int")),
    ({"num_key_value_heads": 3}, ("`num_key_value_heads`", "got 3", "must divide `num_noise_heads` (4")),
    ({"num_key_value_heads": 8}, ("`num_key_value_heads`", "got 8", "must divide `num_noise_heads` (4")),
    ({"head_dim": 18}, ("`head_dim`", "got 18", "multiple of 4", "'v1'")),
    ({"head_dim": 2}, ("`head_dim`", "got 2", "multiple of 4", "'v1'")),
    ({"variant": "v2", "head_dim": 17}, ("`head_dim`", "got 17", "multiple of 2", "'v2'")),
    (
        {"head_dim": None, "hidden_size": 66},
        ("`head_dim`", "`hidden_size` (66)", "not a multiple of the 4 signal heads"),
    ),
    ({"variant": "v3"}, ("'diff_variant'", "got v3", "'v1', 'v2'")),
    ({"variant": None}, ("'diff_variant'", "got None", "'v1', 'v2'")),
    *(
        ({"lambda_init": value}, ("`lambda_init`", f"got {value!r}", "'exponential', a float in (0, 1) or a list"))
        for value in (0.0, 1.0, -0.1, math.nan, math.inf, "foo", "0.5")
    ),
    *(
        ({"lambda_init": [0.2, value]}, ("`lambda_init`", f"got {value!r}", "from -100.0 to 100.0"))
        for value in (math.nan, -math.inf, 1e300)
    ),
    ({"lambda_init": []}, ("`lambda_init`", "not 0,", "got []", "`num_hidden_layers` (2)")),
    ({"lambda_init": [0.2]}, ("`lambda_init`", "not 1,", "got [0.2]", "`num_hidden_layers` (2)")),
    ({"lambda_init": [0.2, "0.3"]}, ("'lambda_init'", "'0.3'", "float")),
    ({"lambda_init": 1}, ("'lambda_init'", "int (value: 1)", "float")),
    *(
        ({name: value}, (f"`{name}`", f"got {value}", "must be a number from"))
        for name in ("lambda_std_dev", "initializer_range", "rms_norm_eps", "head_norm_eps")
        for value in (-0.1, 5.0, math.nan, math.inf)
    ),
    *(
        ({"attention_dropout": value}, ("`attention_dropout`", f"got {value}", "[0, 1)"))
        for value in (1.0, -0.1, 1, math.nan)
    ),
    *(({"sliding_window": value}, ("`sliding_window`", f"got {value}", "from 2 to")) for value in (1, 0, -8)),
    *(
        ({name: [entry]}, (f"`{name}`", "not 1,", f"got [{entry!r}]", "`num_hidden_layers` (2)"))
        for name, entry in (("layer_types", "full_attention"), ("no_rope_layers", 1))
    ),
    *(
        (
            {"layer_types": ["full_attention", name]},
            ("`layer_types`", f"{name!r}]", "and 'sliding_attention'"),
        )
        for name in ("chunked_attention", "linear_attention", "full")
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        ("`layer_types`", "got ['full_attention', 'sliding_attention']", "`sliding_window` is None"),
    ),
    ({"no_rope_layers": [1, 0, 1]}, ("`no_rope_layers`", "not 3,", "got [1, 0, 1]", "`num_hidden_layers` (2)")),
    ({"no_rope_layers": []}, ("`no_rope_layers`", "not 0,", "got []", "`num_hidden_layers` (2)")),
    ({"no_rope_layers": [1, 2]}, ("`no_rope_layers`", "got [1, 2]", "must contain only 0 and 1")),
    ({"attention_chunk_size": 2}, ("`attention_chunk_size`", "got 2", "not supported")),
    ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "got 0.5", "1.0")),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}},
        ("partial_rotary_factor", "got 0.25", "1.0"),
    ),
    ({"rope_parameters": {"rope_type": "linear"}}, ("rope_parameters", "'linear'", "factor")),
    ({"rope_parameters": {"rope_type": "helix"}}, ("['rope_type']", "got 'helix'", "'default'", "yarn")),
    ({"rope_parameters": {"rope_theta": -1.0}}, ("['rope_theta']", "got -1.0", "from 2.0 to")),
    *(
        ({"rope_parameters": rope | {name: value}}, (f"['{name}']", f"got {value!r}", "from"))
        for rope in ({"rope_type": "yarn", "factor": 2.0}, {"rope_type": "llama3"} | LLAMA3)
        for name in ("rope_theta", "factor", "original_max_position_embeddings")
        for value in (math.nan, math.inf, 0, -2, "x")
    ),
    *(
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, name: math.nan}}, (f"['{name}']", "got nan", "from"))
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    ),
    *(
        ({"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {name: value}}, (f"['{name}']", f"got {value}", "from"))
        for name in ("low_freq_factor", "high_freq_factor")
        for value in (math.nan, 0)
    ),
    (
        {"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}},
        ("['high_freq_factor']", "got 4.0", "greater than 'low_freq_factor' (4.0)"),
    ),
    *(
        (
            {"rope_parameters": LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.0, value, 1.0]}},
            ("['long_factor']", f"got {value!r}", "from"),
        )
        for value in (math.nan, 0.0, None, "x")
    ),
    ({"rope_parameters": None, "rope_theta": "x"}, ("['rope_theta']", "got 'x'", "from")),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        ("`rope_parameters`", "got {'full_attention'", "one dictionary for all layers"),
    ),
    (
        {"head_dim": 4, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        ("`head_dim`", "got 4", "'dynamic'"),
    ),
    *(
        ({name: value}, (f"`{name}`", f"got {value!r}", "not supported"))
        for name, value in (
            ("is_causal", False),
            ("is_causal", None),
            ("is_encoder_decoder", True),
            ("original_max_position_embeddings", 4),
            ("per_layer_config", {"0": {}}),
            ("return_dict", False),
            ("return_dict", None),
            ("text_config", {}),
            ("transformers_weights", "other.safetensors"),
        )
    ),
    ({"num_labels": 2.0}, ("`num_labels`", "got 2.0", "an integer from 1")),
    ({"id2label": {}}, ("`id2label`", "got {}", "must map each index")),
    ({"id2label": {"a": "b"}}, ("`id2label`", "got {'a': 'b'}", "must map each index")),
    ({"problem_type": "x"}, ("'problem_type'", "'x'", "regression")),
    ({"dtype": "float33"}, ("`dtype`", "got 'float33'", "floating-point")),
    ({"dtype": "nn"}, ("`dtype`", "got 'nn'", "floating-point")),
    ({"pad_token_id": 97}, ("`pad_token_id`", "got 97", "`vocab_size` (97)")),
    ({"bos_token_id": 2**31}, ("`bos_token_id`", "got 2147483648", "from -1 to")),
    ({"eos_token_id": [2, -2]}, ("`eos_token_id`", "got -2", "from -1 to")),
    ({"classifier_dropout": 1.5}, ("`classifier_dropout`", "got 1.5", "[0, 1)")),
    ({"hidden_act": "sliu"}, ("`hidden_act`", "got 'sliu'", "silu")),
    *(
        (
            {"variant": variant, "rope_parameters": LONGROPE | {name: [1.0] * wrong, other: [1.0] * right}},
            (f"['{name}']", f"not {wrong}", f"must have {right} numbers", f"rotated width {2 * right}"),
        )
        for name, other in (("short_factor", "long_factor"), ("long_factor", "short_factor"))
        for variant, wrong, right in (("v1", 8, 4), ("v2", 4, 8))
    ),
    (
        {"rope_parameters": LONGROPE | {"short_factor": None, "long_factor": [1.0] * 4}},
        ("short_factor", "None", "4 numbers"),
    ),
    ({"hidden_size": 64.0}, ("'hidden_size'", "float (value: 64.0)", "int")),
    ({"rms_norm_eps": 0.0}, ("`rms_norm_eps`", "got 0.0", "from 1e-30 to 1.0")),
    ({"initializer_range": 1.5}, ("`initializer_range`", "got 1.5", "from 0.0 to 1.0")),
    ({"lambda_std_dev": 2.3}, ("`lambda_std_dev`", "got 2.3", "from 0.0 to 2.22")),
    ({"is_causal": 1}, ("`is_causal`", "got 1", "not supported")),
    (
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        ("`rope_parameters`", "one dictionary for all layers"),
    ),
    ({"vocab_size": True}, ("'vocab_size'", "bool (value: True)", "int")),
    *(({name: None}, (f"'{name}'", "NoneType")) for name in ("num_attention_heads", "hidden_act", *SWITCHES)),
    *(({name: "no"}, (f"'{name}'", "str (value: 'no')")) for name in ("attention_out_bias", *SWITCHES)),
    ({"rms_norm_eps": "1e-6"}, ("'rms_norm_eps'", "str (value: '1e-6')", "float")),
    ({"eos_token_id": ["</s>"]}, ("'eos_token_id'", "'</s>'", "int")),
    ({"rope_parameters": [1.0]}, ("'rope_parameters'", "list (value: [1.0])", "dict")),
]


@pytest.mark.parametrize(
    ("fields", "parts"), REFUSED, ids=[re.sub(r"[{}'\" ]", "", str(fields))[:50] for fields, _ in REFUSED]
)
def test_wrong_value_is_refused_with_its_field_value_and_rule(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    written = {"diff_variant" if name == "variant" else name: value for name, value in fields.items()}
    written = json.loads(tiny_config().to_json_string()) | json.loads(json.dumps(written))
    for make in (lambda: tiny_config(**fields), lambda: DiffLlamaConfig.from_dict(written)):
        with pytest.raises(StrictDataclassError) as error:
            make()
        assert [part for part in parts if part not in str(error.value)] == []


def test_model_is_not_loaded_from_the_weights_that_its_configuration_names(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "transformers_weights" not in config
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(StrictDataclassError, match="`transformers_weights` is not supported"):
        DiffLlamaForCausalLM.from_pretrained(tmp_path)


def test_configuration_that_became_wrong_is_not_saved(tmp_path: Path) -> None:
    config = tiny_config()
    config.num_key_value_heads = 3
    with pytest.raises(StrictDataclassError, match="`num_key_value_heads`"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"lambda_init": 1e-6, "lambda_std_dev": 0, "attention_dropout": None, "sliding_window": None},
        {"lambda_init": 0.999, "attention_dropout": 0, "sliding_window": 2, "no_rope_layers": [0, 0]},
        {"sliding_window": 10**6, "layer_types": ["full_attention"] * 2, "attention_chunk_size": None},
        {"layer_types": ["full_attention"] * 2, "partial_rotary_factor": 1.0, "eos_token_id": [1, 2]},
        {"head_dim": None, "num_key_value_heads": 1},
        {"num_noise_heads": 1, "num_key_value_heads": 1, "num_attention_heads": 2, "lambda_init": [-5.0, 1.0]},
        {"head_dim": 24, "num_key_value_heads": 4},
        {"variant": "v2", "head_dim": 18, "max_position_embeddings": 1},
    ],
    ids=str,
)
def test_values_at_the_edge_of_a_rule_are_accepted(fields: dict[str, Any]) -> None:
    config = tiny_config(**fields)
    for name, value in fields.items():
        if value is not None and name not in ("variant", "partial_rotary_factor"):
            assert getattr(config, name) == value


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "yarn", "longrope", "llama3"])
def test_every_rope_type_is_accepted_without_a_warning(
    variant: str, rope_type: str, transformers_warnings: list[str]
) -> None:
    half = 4 if variant == "v1" else 8
    needed = {
        "default": {},
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 2.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0},
        "longrope": LONGROPE | {"short_factor": [1.0] * half, "long_factor": [2.0] * half},
        "llama3": LLAMA3,
    }
    rope = {"rope_type": rope_type, "rope_theta": 5e5} | needed[rope_type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = tiny_config(variant, rope_parameters=dict(rope))
        assert reread(config) == config
    assert config.rope_parameters == rope
    # transformers 5.6 calls `rope_theta` of type "dynamic" unknown, in any model
    assert [warning for warning in transformers_warnings if "{'rope_theta'}" not in warning] == []


def test_warnings_that_the_previous_test_misses_are_seen(transformers_warnings: list[str]) -> None:
    tiny_config(rope_parameters={"rope_type": "linear", "factor": 0.5})
    assert len(transformers_warnings) == 1


def test_auto_map_names_a_class_of_ours_for_every_auto_class(tmp_path: Path) -> None:
    auto_map = saved(tiny_config(), tmp_path)["auto_map"]
    assert auto_map.pop("AutoConfig") == f"configuration_diffllama.{DiffLlamaConfig.__name__}"
    assert auto_map.pop("AutoModel") == "modeling_diffllama.DifferentialLlamaModel"
    assert auto_map == {
        name.replace("DiffLlama", "AutoModel"): f"modeling_diffllama.{getattr(modeling_diffllama, name).__name__}"
        for name in diffllama.__all__
        if "For" in name
    }
    assert len(auto_map) == 4


def test_auto_maps_of_two_configurations_are_two_objects() -> None:
    first, second = tiny_config(), tiny_config()
    first.auto_map["AutoModel"] = "x.Y"
    assert second.auto_map["AutoModel"] == tiny_config().auto_map["AutoModel"] != "x.Y"


def test_rotary_config_is_a_copy_with_only_another_head_dim() -> None:
    config = tiny_config("v1")
    rotary = config.rotary_config()
    assert (config.head_dim, rotary.head_dim) == (16, 8)
    rotary.rope_parameters["rope_theta"] = 1.0
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_long_value_is_cut_in_the_message() -> None:
    for fields in ({"attention_bias": "x" * 10**5}, {"hidden_act": "x" * 10**5}, {"layer_types": ["x"] * 10**4}):
        with pytest.raises(StrictDataclassError, match=next(iter(fields))) as error:
            tiny_config(**fields)
        assert len(str(error.value)) < 2000


@pytest.mark.parametrize("fields", [{}, {"use_qk_norm": True}, {"gated_mlp": False}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensor_parallel_plan_names_what_the_model_has(variant: str, fields: dict[str, bool], tmp_path: Path) -> None:
    config = tiny_config(variant, **fields)
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    expected |= {"gate_proj"} if "gated_mlp" not in fields else set()
    own_vectors = {"self_attn"} if configuration_diffllama.SUMS_OWN_GRADIENTS else set()
    expected |= {"lambda_proj"} if variant == "v2" else {"head_norm", *own_vectors}
    expected |= {"q_norm", "k_norm"} if "use_qk_norm" in fields else set()
    assert "base_model_tp_plan" not in saved(config, tmp_path)
    for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), reread(config)):
        assert {name.rpartition(".")[2] for name in same.base_model_tp_plan} == expected


def test_tensor_parallel_plan_gathers_what_poly_norm_takes_means_of() -> None:
    plan, plain = (tiny_config(hidden_act=name).base_model_tp_plan for name in ("poly_norm", "silu"))
    changed = {name.rpartition(".")[2]: style for name, style in plan.items() if style != plain[name]}
    gathered = dict.fromkeys(("gate_proj", "up_proj"), "colwise_gather_output")
    assert changed == gathered | {"down_proj": "rowwise_split_input"}


HOSTILE = st.sampled_from(
    [None, True, False, 0, -1, 1, 3, 7, 0.5, 4.0, 2**31, 10**30, math.nan, math.inf, -math.inf, 1e-300, 1e300, "x", "",
     [], [1], ["x"], {}, {"x": 1}]
)  # fmt: skip


def values(*sensible: Any) -> st.SearchStrategy[Any]:
    """Generate mostly valid values of a configuration."""
    return st.one_of(st.sampled_from(sensible), st.sampled_from(sensible), HOSTILE)


NUMBERS = values(0.5, 1.0, 2.0, 8, 16, 32.0)
ROPES = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3"} | LLAMA3,
    *(LONGROPE | {"short_factor": [1.0] * half, "long_factor": [2.0] * half} for half in (2, 4)),
    {"rope_type": "proportional"},
    {},
]
ROPE_NAMES = ["rope_type", "partial_rotary_factor", "full_attention", *configuration_diffllama.ROPE_BOUNDS]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "vocab_size": values(1, 11),
    "hidden_size": values(8, 10, 12),
    "intermediate_size": values(1, 8),
    "num_hidden_layers": values(1, 2, 3),
    "num_attention_heads": values(2, 4, 8),
    "num_noise_heads": values(1, 2),
    "num_key_value_heads": values(1, 2, 4),
    "head_dim": values(2, 4, 8),
    "diff_variant": values(*VARIANTS),
    "lambda_init": values("exponential", 0.8, [-0.5, 1.5], [0.2]),
    "lambda_std_dev": values(0.0, 0.1, 2.0, 5.0),
    "head_norm": values(False),
    "head_norm_affine": values(False),
    "head_norm_eps": values(1e-6),
    "hidden_act": values(*ACT2FN, "poly_norm", "poly_norm"),
    "gated_mlp": values(False),
    "max_position_embeddings": values(6, 8),
    "initializer_range": values(0.02, 1.0),
    "rms_norm_eps": values(1e-6),
    "use_cache": HOSTILE,
    "pad_token_id": values(0, 10, -11),
    "bos_token_id": values(1),
    "eos_token_id": values(1, [1, 2]),
    "tie_word_embeddings": values(True),
    "rope_parameters": st.builds(
        operator.or_, st.sampled_from(ROPES), st.dictionaries(st.sampled_from(ROPE_NAMES), NUMBERS, max_size=2)
    ),
    "rope_theta": values(100.0),
    "attention_bias": values(True),
    "attention_out_bias": values(True),
    "attention_dropout": values(0.1),
    "mlp_bias": values(True),
    "use_qk_norm": values(True),
    "no_rope_layers": values([0, 1], [1]),
    "sliding_window": values(2, 8),
    "layer_types": values(["full_attention", "sliding_attention"], ["full_attention"]),
    "num_labels": values(1, 3),
    "id2label": values({0: "a"}, {"0": "a", "1": "b"}),
    "problem_type": values("regression"),
    "dtype": values("float32", "bfloat16"),
    "output_hidden_states": values(True),
    **dict.fromkeys(configuration_diffllama.UNSUPPORTED, HOSTILE),
}


@settings(max_examples=300, derandomize=True, deadline=timedelta(seconds=60))
@given(
    st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
    ),
    st.sampled_from(["eager", "sdpa"]),
)
def test_any_configuration_is_refused_by_name_or_decodes_as_its_whole_forward_does(
    fields: dict[str, Any], implementation: str
) -> None:
    small = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 4, "head_dim": 8}
    given = {"variant" if name == "diff_variant" else name: value for name, value in copy.deepcopy(fields).items()}
    try:
        config = tiny_config(**small | given)
    except StrictDataclassError as error:
        assert [name for name in fields if name in str(error)], str(error)  # noqa: PT017
        return
    assert reread(config) == config
    DiffLlamaForTokenClassification(copy.deepcopy(config))
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM._from_config(config, dtype=torch.float64, attn_implementation=implementation).eval()
    input_ids = tokens(1, 6, vocab_size=config.vocab_size) if config.vocab_size > 1 else torch.zeros(1, 6).long()
    with torch.no_grad():
        whole = model(input_ids).logits
        start = model(input_ids[:, :4], use_cache=True)
        steps = [start.logits]
        for i in (4, 5):
            step = model(input_ids[:, i : i + 1], past_key_values=start.past_key_values, use_cache=True)
            steps.append(step.logits)
    assert torch.isfinite(whole).all()
    limits = [config.max_position_embeddings, config.rope_parameters.get("original_max_position_embeddings") or 6]
    if config.rope_parameters["rope_type"] not in ("dynamic", "longrope") or min(limits) >= 6:  # else keys change
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-9, atol=1e-9 * float(whole.abs().max()))


@given(st.data(), st.sampled_from(VARIANTS), st.integers(1, 64), st.booleans())
def test_any_valid_geometry_is_accepted_and_survives_json(
    data: st.DataObject, variant: str, heads: int, by_default: bool
) -> None:
    key_value_heads = data.draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    head_dim = data.draw(st.integers(1, 128)) * (4 if variant == "v1" else 2)
    fields = {"num_key_value_heads": key_value_heads, "head_dim": head_dim, "hidden_size": 8192}
    if by_default:  # both follow from the width
        key_value_heads, head_dim = heads, 4 * data.draw(st.integers(1, 32))
        fields = {"num_key_value_heads": None, "head_dim": None, "hidden_size": head_dim * heads}
    config = tiny_config(variant, num_attention_heads=2 * heads, **fields)
    assert reread(config) == config
    assert [getattr(config, name) for name in GEOMETRY] == [2 * heads, key_value_heads, head_dim]
    assert config.rotary_dim == (head_dim // 2 if variant == "v1" else head_dim)
    assert config.rotary_config().head_dim == config.rotary_dim
    assert config.rotary_dim % 2 == 0
