import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel, PreTrainedModel

from diffllama import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DiffLlamaForQuestionAnswering,
    DiffLlamaForSequenceClassification,
    DiffLlamaForTokenClassification,
    DiffLlamaModel,
    modeling_diff,
)
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_config, tiny_model, tokens


HEADS = {
    DiffLlamaForSequenceClassification: {"score.weight"},
    DiffLlamaForTokenClassification: {"score.weight", "score.bias"},
    DiffLlamaForQuestionAnswering: {"qa_outputs.weight", "qa_outputs.bias"},
}
"""Task head -> its own weights, which no language model's checkpoint has."""

CODE = {f.name for f in Path(modeling_diff.__file__).parent.glob("*.py") if f.name != "__init__.py"}

needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
LOADINGS = [
    pytest.param({}, id="plain"),
    pytest.param({"device_map": "cpu"}, id="device_map cpu", marks=needs_accelerate),
    pytest.param({"device_map": "auto", "max_memory": {"cpu": "1GiB"}}, id="device_map auto", marks=needs_accelerate),
    pytest.param({"low_cpu_mem_usage": True}, id="low_cpu_mem_usage"),
]

ROPE = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 4},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
"""Rotary embeddings of 16 positions, which the 24 tokens of `INPUT_IDS` exceed."""

INPUT_IDS = tokens(2, 24)


def rope_config(variant: str, rope_type: str) -> DiffLlamaConfig:
    """Return a tiny configuration with `rope_type`."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE[rope_type]}
    if rope_type == "longrope":
        half = {"v1": 4, "v2": 8}[variant]  # pairs in the rotated width
        rope |= {"short_factor": [1.0 + 0.1 * i for i in range(half)], "long_factor": [1.0 + i for i in range(half)]}
    return tiny_config(variant, max_position_embeddings=16, rope_parameters=rope)


def distinct_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Randomize every weight of a model, including norms and biases. Returns it in evaluation mode."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


@torch.no_grad()
def outputs(model: PreTrainedModel) -> torch.Tensor:
    """Return all outputs of the model for `INPUT_IDS`, flat."""
    result = model(INPUT_IDS, use_cache=False)
    return torch.cat([tensor.flatten() for tensor in result.to_tuple()])


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def load(folder: Path, model_class: type = DiffLlamaForCausalLM, **arguments: Any) -> PreTrainedModel:
    """Load a checkpoint, which must have exactly the class's weights."""
    arguments = {"attn_implementation": "eager", **arguments}
    model, report = model_class.from_pretrained(folder, output_loading_info=True, **arguments)
    assert {kind: found for kind, found in report.items() if found} == {}
    assert {p.device.type for p in model.parameters()} == {"cpu"}  # none is left on the meta device
    return model


def assert_survives(model: PreTrainedModel, tmp_path: Path, **arguments: Any) -> PreTrainedModel:
    """Save, load and save again: equal outputs and equal files. Returns the loaded model."""
    expected = outputs(model)
    model.save_pretrained(tmp_path / "first")
    loaded = load(tmp_path / "first", type(model), **arguments)
    assert torch.equal(outputs(loaded), expected)
    loaded.save_pretrained(tmp_path / "second")
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert list(first) == list(second)
    assert [name for name in first if first[name] != second[name]] == []
    return loaded


def state_dict_shapes(variant: str, heads: int, key_value_heads: int, width: int, **fields: bool) -> dict[str, tuple]:
    """Return names and shapes of the state dict, for two layers of width 64, 96 in the MLP, and 97 tokens."""
    layer = {
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
        "self_attn.q_proj.weight": ({"v1": 1, "v2": 2}[variant] * heads * width, 64),
        "self_attn.k_proj.weight": (key_value_heads * width, 64),
        "self_attn.v_proj.weight": (key_value_heads * width, 64),
        "self_attn.o_proj.weight": (64, heads * width),
    }
    if variant == "v1":
        layer |= {f"self_attn.lambda_{name}": (width // 2,) for name in ("q1", "k1", "q2", "k2")}
        if fields.get("head_norm", True) and fields.get("head_norm_affine", True):
            layer["self_attn.head_norm.weight"] = (width,)
    else:
        layer["self_attn.lambda_proj.weight"] = (heads, 64)
    if fields.get("use_qk_norm"):
        layer |= {f"self_attn.{name}_norm.weight": ({"v1": width // 2, "v2": width}[variant],) for name in "qk"}
    if fields.get("attention_out_bias"):
        layer["self_attn.o_proj.bias"] = (64,)
    rest = {"model.embed_tokens.weight": (97, 64), "model.norm.weight": (64,), "lm_head.weight": (97, 64)}
    return rest | {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}


@pytest.mark.parametrize(
    "fields",
    [{}, {"head_norm": False}, {"head_norm_affine": False}, {"use_qk_norm": True, "attention_out_bias": True}],
    ids=str,
)
@pytest.mark.parametrize(("heads", "key_value_heads", "width"), [(4, 2, 16), (3, 1, 20)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_have_the_names_and_shapes_of_the_interface(
    variant: str, heads: int, key_value_heads: int, width: int, fields: dict[str, bool], tmp_path: Path
) -> None:
    model = tiny_model(
        variant, num_attention_heads=2 * heads, num_key_value_heads=key_value_heads, head_dim=width, **fields
    )
    expected = state_dict_shapes(variant, heads, key_value_heads, width, **fields)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == expected


@pytest.mark.parametrize("loading", LOADINGS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loaded_model_computes_the_same_bits_and_saves_the_same_bytes_once(
    tied: bool, loading: dict[str, Any], tmp_path: Path
) -> None:
    loaded = assert_survives(distinct_weights(tiny_model(tie_word_embeddings=tied)), tmp_path, **loading)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    with safe_open(tmp_path / "first" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(loaded.state_dict()) - ({"lm_head.weight"} if tied else set())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_norm": False, "attention_bias": True, "mlp_bias": True},
        {"head_norm_affine": False, "attention_bias": True, "attention_out_bias": False},
        {"lambda_init": 0.5, "sliding_window": 5, "num_key_value_heads": 1, "head_dim": 20},
        {"gated_mlp": False, "mlp_bias": True, "hidden_act": "poly_norm"},
        EVERY_FEATURE,
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_layer_survives_saving(variant: str, fields: dict[str, Any], tmp_path: Path) -> None:
    loaded = assert_survives(distinct_weights(tiny_model(variant, **fields)), tmp_path)
    assert {name: getattr(loaded.config, name) for name in fields} == fields
    if variant == "v1" and "lambda_init" in fields:
        given = fields["lambda_init"]
        expected = given if isinstance(given, list) else [given, given]
        assert [layer.self_attn.lambda_init for layer in loaded.model.layers] == expected


def test_missing_weights_are_initialised_and_leave_the_others_as_loaded(tmp_path: Path) -> None:
    model = distinct_weights(tiny_model(hidden_act="poly_norm"))
    norm, vector = (f"model.layers.0.self_attn.{name}" for name in ("head_norm.weight", "lambda_k2"))
    weight, bias = (f"model.layers.0.mlp.act_fn.{name}" for name in ("weight", "bias"))
    kept = {name: tensor for name, tensor in model.state_dict().items() if name not in (norm, vector, weight, bias)}
    model.save_pretrained(tmp_path, state_dict=kept)
    loaded, report = DiffLlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {norm, vector, weight, bias}
    weights = loaded.state_dict()
    assert [name for name in kept if not torch.equal(weights[name], kept[name])] == []
    assert torch.equal(weights[norm], torch.ones(16))
    assert torch.equal(weights[weight], torch.full((3,), 1 / 3))
    assert torch.equal(weights[bias], torch.zeros(1))
    assert 0.0 < weights[vector].std() < 1.0  # `lambda_std_dev` is 0.3


def test_folder_has_configuration_code_and_safetensors_and_no_pickle(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert set(contents(tmp_path)) == CODE | {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_load_to_the_same_bits_and_hold_each_weight_once(variant: str, tmp_path: Path) -> None:
    model = distinct_weights(tiny_model(variant))
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 2
    names = {f.name for f in (tmp_path / "shards").iterdir()} - {shard.name for shard in shards}
    assert names == CODE | {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert sorted(name for shard in shards for name in load_file(shard)) == sorted(model.state_dict())
    loaded = load(tmp_path / "shards")
    assert torch.equal(outputs(loaded), outputs(model))
    loaded.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "original")
    assert contents(tmp_path / "whole") == contents(tmp_path / "original")


@pytest.mark.parametrize("rope_type", ROPE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rotary_embedding_survives_saving_and_the_meta_device(
    variant: str, rope_type: str, tmp_path: Path
) -> None:
    config = rope_config(variant, rope_type)
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    fresh = {name: buffer.clone() for name, buffer in model.named_buffers()}  # `dynamic`, `longrope` change them
    assert set(fresh) == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    expected = outputs(model)
    model.save_pretrained(tmp_path)

    with torch.device("meta"):
        empty = DiffLlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    assert {tensor.device.type for tensor in empty.state_dict(keep_vars=True).values()} == {"meta"}
    empty.to_empty(device="cpu")
    for buffer in empty.buffers():
        buffer.fill_(torch.nan)
    empty.init_weights()  # transformers computes rotary frequencies here, by the class's name and its configuration
    empty.load_state_dict(load_file(tmp_path / "model.safetensors"))

    for loaded in (empty, load(tmp_path)):
        buffers = dict(loaded.named_buffers())
        assert [name for name in fresh if not torch.equal(buffers[name], fresh[name])] == []
        assert torch.equal(outputs(loaded), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_loads_as_the_rounded_weights_with_float32_rotary_tables(variant: str, tmp_path: Path) -> None:
    model = distinct_weights(tiny_model(variant))
    model.save_pretrained(tmp_path / "float32")
    tables = {name: buffer.clone() for name, buffer in model.model.rotary_emb.named_buffers()}
    model.to(torch.bfloat16)
    loaded = load(tmp_path / "float32", dtype="bfloat16")
    assert loaded.config.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    for name, table in tables.items():
        assert torch.equal(loaded.model.rotary_emb.get_buffer(name), table), name
        setattr(model.model.rotary_emb, name, table)  # `model.to` rounds frequencies, loading does not
    assert torch.equal(outputs(loaded), outputs(model))
    loaded.save_pretrained(tmp_path / "bfloat16")
    assert torch.equal(outputs(load(tmp_path / "bfloat16")), outputs(model))  # in its own dtype by default


@pytest.mark.parametrize("size", [120, 50])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_resized_embeddings_keep_old_tokens_and_survive_saving(
    variant: str, tied: bool, size: int, tmp_path: Path
) -> None:
    model = tiny_model(variant, tie_word_embeddings=tied)
    kept, input_ids = min(size, 97), tokens(2, 7, vocab_size=50)
    with torch.no_grad():
        before = model(input_ids).logits[..., :kept]
        model.resize_token_embeddings(size)
        after = model(input_ids).logits
        assert after.shape[-1] == size
        torch.testing.assert_close(after[..., :kept], before)
        model.save_pretrained(tmp_path)
        loaded = load(tmp_path)
        assert loaded.config.vocab_size == loaded.vocab_size == size
        assert torch.equal(loaded(input_ids).logits, after)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


class TestTaskHeads:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("head", HEADS)
    def test_head_survives_saving(self, head: type[PreTrainedModel], variant: str, tmp_path: Path) -> None:
        model = head._from_config(tiny_config(variant), attn_implementation="sdpa")
        assert_survives(distinct_weights(model), tmp_path, attn_implementation="sdpa")

    def test_each_takes_the_body_of_a_language_model(self, tmp_path: Path) -> None:
        model = distinct_weights(tiny_model())
        model.save_pretrained(tmp_path)
        for head, weights in HEADS.items():
            loaded, report = head.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
            assert set(report["missing_keys"]) == weights
            assert set(report["unexpected_keys"]) == {"lm_head.weight"}
            assert torch.equal(outputs(loaded.model), outputs(model.model))

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("head", [*HEADS, DiffLlamaForCausalLM])
    def test_automodel_takes_its_body(self, head: type[PreTrainedModel], variant: str, tmp_path: Path) -> None:
        model = distinct_weights(head(tiny_config(variant)))
        model.save_pretrained(tmp_path)
        body, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
        assert type(body) is DiffLlamaModel
        assert report["missing_keys"] == set()
        assert set(report["unexpected_keys"]) == HEADS.get(head, {"lm_head.weight"})
        assert torch.equal(outputs(body), outputs(model.model))

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_language_model_takes_a_saved_body(self, variant: str, tmp_path: Path) -> None:
        model = distinct_weights(tiny_model(variant))
        model.model.save_pretrained(tmp_path)
        loaded, report = DiffLlamaForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True, attn_implementation="eager"
        )
        assert set(report["missing_keys"]) == {"lm_head.weight"}
        assert torch.equal(outputs(loaded.model), outputs(model.model))
