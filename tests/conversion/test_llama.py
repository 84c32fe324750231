import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

import diffllama
from diffllama import DiffLlamaForCausalLM
from diffllama.checkpoints.models import expected_tensors
from diffllama.conversion.llama import WEIGHT_MAPS, convert_config, new_weights
from diffllama.conversion.weight_map import find_rules, plan
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP
from support import subprocess_runner
from support.llama_checkpoints import (
    RELATIVES,
    SIZES,
    apply,
    edit_config,
    edit_weights,
    llama,
    save_model,
    verification,
)
from support.tiny_models import tokens


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMAS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa-tied": {"tie_word_embeddings": True},
    "mqa-biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 24, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
}
DTYPES = ("float32", "bfloat16")
ONE = "model.layers.0.self_attn."
INVERSE_FREQUENCIES = {f"{ONE}rotary_emb.inv_freq", "model.rotary_emb.inv_freq"}
CASES = {name: (LlamaConfig, fields) for name, fields in LLAMAS.items()} | RELATIVES
convert = partial(diffllama.convert, source="llama")


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Compute the logits of two rows, the second one padded on the left."""
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    with torch.no_grad():
        return model.eval()(input_ids=tokens(2, 24), attention_mask=mask).logits


def source_config(case: str) -> PreTrainedConfig:
    config_class, fields = CASES[case]
    return config_class(**(SIZES | fields))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Path]]:
    """Folders by case and dtype: of the source and of its conversion."""
    root, result = tmp_path_factory.mktemp("llamas"), {}
    for case in CASES:
        source = save_model(root / case, source_config(case))
        for dtype in DTYPES:
            result[case, dtype] = source, convert(source, root / f"{case}-{dtype}", dtype=dtype, verify=False)
    return result


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "src")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal_bit_for_bit(case: str, dtype: str, folders: dict[tuple[str, str], tuple[Path, Path]]) -> None:
    original, converted = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for folder in folders[case, dtype])
    assert type(original) is not type(converted) is DiffLlamaForCausalLM
    assert converted.dtype == original.dtype == getattr(torch, dtype)
    for implementation in ("eager", "sdpa"):
        for model in (original, converted):
            model.set_attn_implementation(implementation)
        assert torch.equal(logits(converted), logits(original))


def test_logits_are_equal_where_diffllama_is_not_installed(
    folders: dict[tuple[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    code = """
import json, sys
sys.modules["diffllama"] = None
import torch
from transformers import AutoModelForCausalLM
for case, dtype, source, folder in json.loads(sys.argv[1]):
    # Without grouped queries torch 2.6 computes h heads and 2h heads by other kernels under sdpa
    attention = "eager" if case == "mha" and torch.__version__.startswith("2.6.") else "sdpa"
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attention)
        converted = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation=attention)
        ids = torch.arange(48).view(2, 24)
        same = torch.equal(converted(ids).logits, original(ids).logits)
    facts[f"{case} {dtype}"] = same and type(converted).__module__.startswith("transformers_modules.")
"""
    chosen = [(case, DTYPES[i % 2]) for i, case in enumerate(CASES)]
    given = json.dumps([[*key, *map(str, folders[key])] for key in chosen])
    equal, _ = subprocess_runner.run(code, given, environment=os.environ | {"HF_MODULES_CACHE": str(tmp_path)})
    assert equal == {f"{case} {dtype}": True for case, dtype in chosen}


def test_float16_logits_are_equal_but_for_the_rounding_of_tiny_numbers(tmp_path: Path) -> None:
    original = LlamaForCausalLM.from_pretrained(llama(tmp_path / "src"), dtype="float16")
    converted = DiffLlamaForCausalLM.from_pretrained(convert(tmp_path / "src", tmp_path / "dest", dtype="float16"))
    assert converted.dtype == torch.float16
    torch.testing.assert_close(logits(converted), logits(original), rtol=2**-9, atol=2**-9)


def test_rotary_frequencies_that_old_checkpoints_carry_are_left_out(source: Path, tmp_path: Path) -> None:
    edit_weights(source, lambda weights: weights.update({name: torch.zeros(8) for name in INVERSE_FREQUENCIES}))
    weights = load_file(convert(source, tmp_path / "dest") / "model.safetensors")
    assert not [name for name in weights if "inv_freq" in name]


def test_configuration_is_the_sources_as_v2(source: Path, tmp_path: Path) -> None:
    edit_config(source, rms_norm_eps=1e-4, auto_map={"AutoConfig": "other.Code"}, bos_token_id=5)
    written = json.loads((convert(source, tmp_path / "dest") / "config.json").read_text())
    assert written["auto_map"] == AUTO_MAP
    assert (written["model_type"], written["diff_variant"]) == ("diff_llama", "v2")
    assert written["architectures"] == ["DifferentialLlamaForCausalLM"]
    assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (8, 2, 16)
    assert (written["rms_norm_eps"], written["bos_token_id"], written["hidden_size"]) == (1e-4, 5, 64)


def test_training_tells_the_two_maps_of_a_head_apart(source: Path, tmp_path: Path) -> None:
    model = DiffLlamaForCausalLM.from_pretrained(convert(source, tmp_path / "dest"))
    ids = tokens(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    first, second = model.model.layers[0].self_attn.q_proj.weight.grad.view(4, 2, 16, 64).unbind(1)
    assert first.abs().max() > 0
    torch.testing.assert_close(second, -first / 2)


@pytest.mark.parametrize(("variant", "noise_heads"), [("v2", None), ("v2", 2), ("v1", None), ("v1", 1)])
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("mqa-biases", "mha")])
def test_weight_map_makes_every_tensor_of_ours(case: str, variant: str, noise_heads: int | None) -> None:
    source = source_config(case)
    config = convert_config(source, variant, noise_heads)
    converted = {
        name: step.result for name, step in plan(expected_tensors(source), WEIGHT_MAPS[variant], config).items()
    }
    new = {name: make() for name, make in new_weights(config).items()}
    assert not converted.keys() & new.keys()
    expected = expected_tensors(config)
    assert {name: w.shape for name, w in (converted | new).items()} == {name: w.shape for name, w in expected.items()}


def test_no_entry_of_the_weight_map_is_idle() -> None:
    names = {name for case in CASES for name in expected_tensors(source_config(case))}
    used = {name: find_rules(name, WEIGHT_MAPS["v2"]) for name in names | INVERSE_FREQUENCIES}
    assert None not in used.values()
    templates = {re.sub(r"\d+", "{i}", name) for name in used}
    assert templates == set(WEIGHT_MAPS["v2"]) == set(WEIGHT_MAPS["v1"])


LAYER_TYPES = ["full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (source_config("mha"), {}),
        (LlamaConfig(**SIZES, sliding_window=40), {}),  # transformers' Llama has no window
        (MistralConfig(**SIZES, sliding_window=None, attention_bias=True, mlp_bias=True), {}),  # Mistral has no biases
        (source_config("qwen2"), {"attention_bias": True, "attention_out_bias": False}),
        (source_config("qwen3"), {"use_qk_norm": True, "head_dim": 24}),
        (source_config("mistral-window"), WINDOWS),
        (source_config("qwen3-window"), WINDOWS | {"use_qk_norm": True, "layer_types": LAYER_TYPES}),
        (source_config("smollm3"), {"no_rope_layers": [1, 0]}),
        (source_config("phi3-window"), WINDOWS),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_optional_fields_are_those_that_the_source_reads(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    optional = ("attention_bias", "attention_out_bias", "mlp_bias", "use_qk_norm", "no_rope_layers", "sliding_window")
    plain = convert_config(LlamaConfig(**SIZES), "v2")
    default = {name: getattr(plain, name) for name in (*optional, "layer_types", "head_dim")}
    converted = convert_config(config, "v2")
    assert {name: getattr(converted, name) for name in default} == default | fields


def test_dropouts_that_we_lack_are_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "src", Phi3Config(**SIZES))
    edit_config(source, resid_pdrop=0.1)
    with pytest.raises(ValueError, match=r"`resid_pdrop` of the source must be 0 .* got 0\.1"):
        convert(source, tmp_path / "dest")
    assert not (tmp_path / "dest").exists()


def test_window_of_the_source_is_a_window_of_ours_when_generating(tmp_path: Path) -> None:
    source = save_model(tmp_path / "src", source_config("mistral-window"))
    original = AutoModelForCausalLM.from_pretrained(source)
    converted = AutoModelForCausalLM.from_pretrained(convert(source, tmp_path / "dest"))
    arguments = {"input_ids": tokens(2, 12), "max_new_tokens": 16, "do_sample": False}
    ids = original.generate(**arguments)
    assert ids.shape == (2, 28)
    assert torch.equal(converted.generate(**arguments), ids)


def test_cache_that_longrope_outgrows_is_filled_anew(tmp_path: Path) -> None:
    folder = convert(save_model(tmp_path / "src", source_config("phi3-longrope")), tmp_path / "dest")
    model = AutoModelForCausalLM.from_pretrained(folder)
    arguments = {"input_ids": tokens(2, 12), "max_new_tokens": 12, "do_sample": False}  # beyond the limit of 16
    ids = model.generate(**arguments)
    assert ids.shape == (2, 24)
    assert torch.equal(ids, model.generate(**arguments, use_cache=False))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    key_value_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    width=st.sampled_from([2, 6, 16]),
    ratio=st.integers(1, 3),
    layers=st.integers(1, 2),
    bias=st.booleans(),
    length=st.integers(1, 9),
)
def test_v2_has_the_same_bits_for_all_shapes(
    key_value_heads: int, groups: int, width: int, ratio: int, layers: int, bias: bool, length: int
) -> None:
    hidden = ratio * key_value_heads * groups  # LlamaConfig requires a multiple of the number of heads
    source = LlamaConfig(
        **SIZES
        | {"hidden_size": hidden, "num_hidden_layers": layers, "head_dim": width, "attention_bias": bias}
        | {"num_attention_heads": key_value_heads * groups, "num_key_value_heads": key_value_heads}
    )
    config = convert_config(source, "v2")
    torch.manual_seed(0)
    original, converted = (
        AutoModelForCausalLM.from_config(c, attn_implementation="eager").eval() for c in (source, config)
    )
    weights = original.state_dict()
    state = apply(weights, WEIGHT_MAPS["v2"], config) | {name: make() for name, make in new_weights(config).items()}
    converted.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(original(tokens(1, length)).logits, converted(tokens(1, length)).logits)


# V1


@pytest.mark.parametrize("groups", [1, 2])
def test_v1_pairs_the_heads_of_neighbouring_key_value_heads(groups: int, tmp_path: Path) -> None:
    source = llama(tmp_path / "src", num_attention_heads=4 * groups, num_key_value_heads=4, head_dim=8)
    folder = convert(source, tmp_path / "dest", variant="v1")
    old, new = (load_file(place / "model.safetensors") for place in (source, folder))
    heads = [(2 * pair + map) * groups + i for pair in (0, 1) for i in range(groups) for map in (0, 1)]
    assert torch.equal(new[f"{ONE}q_proj.weight"], old[f"{ONE}q_proj.weight"].view(-1, 8, 64)[heads].flatten(0, 1))
    for name in ("k_proj", "v_proj"):
        assert torch.equal(new[f"{ONE}{name}.weight"], old[f"{ONE}{name}.weight"])
    config = DiffLlamaForCausalLM.from_pretrained(folder).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4 * groups, 2, 16)
    assert config.diff_variant == "v1"


def test_v1_begins_with_the_papers_lambdas_and_norm(source: Path, tmp_path: Path) -> None:
    weights = load_file(convert(source, tmp_path / "dest", variant="v1") / "model.safetensors")
    again = load_file(convert(source, tmp_path / "again", variant="v1") / "model.safetensors")
    vectors = torch.stack([tensor for name, tensor in sorted(weights.items()) if "lambda" in name])
    assert vectors.shape == (8, 16)
    assert len({tuple(vector.tolist()) for vector in vectors}) == 8
    assert 0.08 < vectors.std() < 0.12
    assert torch.equal(weights[f"{ONE}head_norm.weight"], torch.ones(32))
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_v1_says_that_it_is_another_function_and_by_how_much(source: Path, tmp_path: Path) -> None:
    folder = convert(source, tmp_path / "dest", variant="v1")
    result = verification(folder)
    assert (result["tolerance"], result["bit_equal"]) == (None, False)
    assert 0 < result["mean_difference"] < result["max_difference"]
    assert result["same_top_token"] < 1
    assert "not an exact conversion" in (folder / "README.md").read_text()


def test_v1_needs_an_even_number_of_key_value_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`num_key_value_heads` .* must be even .* got 1\. Use variant='v2'"):
        convert(llama(tmp_path / "src", num_key_value_heads=1), tmp_path / "dest", variant="v1")


# Fewer noise heads than signal heads


def test_groups_of_equal_queries_have_the_sources_logits(source: Path, tmp_path: Path) -> None:
    def repeat(weights: dict[str, torch.Tensor]) -> None:
        for i in range(2):
            queries = weights[f"model.layers.{i}.self_attn.q_proj.weight"].view(2, 2, -1)
            queries[:, 1] = queries[:, 0]

    edit_weights(source, repeat)
    folder = convert(source, tmp_path / "dest", noise_heads=2, verify=True)
    expected, got = (logits(AutoModelForCausalLM.from_pretrained(place)) for place in (source, folder))
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("variant", "noise_heads", "heads"), [("v2", 2, (6, 2, 2)), ("v1", 1, (3, 1, 1))])
def test_groups_say_that_they_are_another_function(
    variant: str, noise_heads: int, heads: tuple[int, int, int], source: Path, tmp_path: Path
) -> None:
    folder = convert(source, tmp_path / "dest", variant=variant, noise_heads=noise_heads)
    config = DiffLlamaForCausalLM.from_pretrained(folder).config
    assert (config.num_attention_heads, config.num_noise_heads, config.num_key_value_heads) == heads
    assert verification(folder)["tolerance"] is None
    assert verification(folder)["max_difference"] > 0
    assert json.loads((folder / "conversion.json").read_text())["options"]["noise_heads"] == noise_heads


def test_noise_head_for_every_signal_head_is_exact(source: Path, tmp_path: Path) -> None:
    assert verification(convert(source, tmp_path / "dest", noise_heads=4))["bit_equal"] is True


@pytest.mark.parametrize(
    ("variant", "noise_heads", "counts"),
    [("v2", 3, (4, 2)), ("v2", 1, (4, 2)), ("v2", 0, (4, 2)), ("v2", 8, (4, 2)), ("v1", 4, (2, 1)), ("v1", -1, (2, 1))],
)
def test_noise_heads_that_make_no_groups_are_refused(
    variant: str, noise_heads: int, counts: tuple[int, int], source: Path, tmp_path: Path
) -> None:
    rule = rf"`noise_heads` must divide the signal heads \({counts[0]}\) .* key/value heads \({counts[1]}\)"
    with pytest.raises(ValueError, match=rf"{rule}.*, got {noise_heads}\."):
        convert(source, tmp_path / "dest", variant=variant, noise_heads=noise_heads)
    assert not (tmp_path / "dest").exists()
