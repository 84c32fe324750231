import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM, convert
from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.models import expected_tensors
from diffllama.conversion import unilm, unilm_reference
from diffllama.conversion.unilm import FROM_UNILM, TO_UNILM
from support.llama_checkpoints import add_tokenizer, apply, save_model, snapshot, verification
from support.tiny_models import VARIANTS, tiny_config, tokens


HIDDEN, VOCABULARY, INTERMEDIATE, LAYERS, WIDTH, HEADS = 48, 97, 72, 3, 16, 4
SETTINGS = {"rms_norm_eps": 1e-4, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "bos_token_id": 5}
Weights = dict[str, torch.Tensor]


def attention(variant: str, key_value_heads: int, seed: int = 0) -> Weights:
    """Return random weights of one of unilm's modules, under its names: h = 4 heads, D = 16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q_proj.weight": (HEADS * WIDTH * (1 if variant == "v1" else 2), HIDDEN),
        "k_proj.weight": (key_value_heads * WIDTH, HIDDEN),
        "v_proj.weight": (key_value_heads * WIDTH, HIDDEN),
    }
    if variant == "v1":
        shapes |= {"out_proj.weight": (HIDDEN, HEADS * WIDTH), "subln.weight": (WIDTH,)}
        shapes |= {f"lambda_{name}": (WIDTH // 2,) for name in ("q1", "k1", "q2", "k2")}
    else:
        shapes |= {"o_proj.weight": (HIDDEN, HEADS * WIDTH), "lambda_proj.weight": (HEADS, HIDDEN)}
    return {name: ("subln" in name) + 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def model(variant: str, key_value_heads: int, tied: bool = False) -> Weights:
    """Return random weights of a whole model under unilm's names."""
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    weights = {
        name: ("norm" in name) + 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    for i in range(LAYERS):
        module = attention(variant, key_value_heads, seed=i)
        weights |= {f"model.layers.{i}.self_attn.{name}": tensor for name, tensor in module.items()}
    return weights


def write(folder: Path, weights: Weights, **fields: Any) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SETTINGS | fields))
    return folder


def frequencies(variant: str, theta: float) -> torch.Tensor:
    """Return θ^(-2i / w) for each pair i of a query of width w."""
    width = WIDTH // 2 if variant == "v1" else WIDTH
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def reference(weights: Weights, variant: str, gqa_layout: str = "grouped") -> torch.Tensor:
    return unilm_reference.logits(
        tokens(2, 24), weights, rms_norm_eps=1e-4, inverse_frequencies=frequencies(variant, 5000.0),
        gqa_layout=gqa_layout,
    )  # fmt: skip


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(tokens(2, 24)).logits


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.std() > 0.1
    assert (a - b).abs().max() <= 1e-5


@pytest.mark.parametrize(("key_value_heads", "tied"), [(4, False), (2, True), (1, False)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_model_computes_what_unilms_formulas_do(
    variant: str, key_value_heads: int, tied: bool, tmp_path: Path
) -> None:
    weights = model(variant, key_value_heads, tied)
    add_tokenizer(write(tmp_path / "src", weights))
    folder = convert(tmp_path / "src", tmp_path / "dest", source=f"unilm-{variant}", verify=True)
    assert (folder / "tokenizer.json").is_file()
    assert_close(reference(weights, variant), logits(folder))
    assert verification(folder)["passed"] is True
    assert verification(folder)["max_difference"] <= 1e-5
    config = AutoConfig.from_pretrained(folder)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (HIDDEN, LAYERS, INTERMEDIATE)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, key_value_heads, WIDTH)
    assert (config.rms_norm_eps, config.bos_token_id, config.tie_word_embeddings) == (1e-4, 5, tied)


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_repeated_keys_are_kept_with_keys_for_every_head(key_value_heads: int, tmp_path: Path) -> None:
    weights = model("v1", key_value_heads)
    source = write(tmp_path / "src", weights)
    folder = convert(source, tmp_path / "dest", source="unilm-v1", gqa_layout="repeated")
    expected = reference(weights, "v1", "repeated")
    assert_close(expected, logits(folder))
    assert AutoConfig.from_pretrained(folder).num_key_value_heads == HEADS
    different = (reference(weights, "v1") - expected).abs().max()
    assert different <= 1e-5 if key_value_heads == HEADS else different > 0.1


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [(torch.float64, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, True)],
    ids=str,
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_conversion_there_and_back_gives_the_same_bits(
    variant: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in model(variant, 2, tied).items()}
    source = write(tmp_path / "src", weights)
    there = convert(source, tmp_path / "there", source=f"unilm-{variant}", max_shard_size="20KB", verify=False)
    assert len(list(there.glob("*.safetensors"))) > 3
    back = convert(there, tmp_path / "back", target=f"unilm-{variant}", verify=True)
    assert verification(back)["passed"] is True
    again = load_file(back / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_transformers_does_not_take_a_unilm_folder_for_its_own(tmp_path: Path) -> None:
    source = save_model(tmp_path / "src", tiny_config("v2"))
    folder = convert(source, tmp_path / "dest", target="unilm-v2", verify=False)
    with pytest.raises(ValueError, match="unilm-v2"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not list(folder.glob("*.py"))


def test_rotation_scaled_by_yarn_is_verified(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    source = save_model(tmp_path / "src", tiny_config("v2", rope_parameters=yarn))
    assert verification(convert(source, tmp_path / "dest", target="unilm-v2", verify=True))["passed"] is True


def test_norm_without_weight_becomes_one_with_ones(tmp_path: Path) -> None:
    source = save_model(tmp_path / "src", tiny_config("v1", head_norm_affine=False))
    folder = convert(source, tmp_path / "dest", target="unilm-v1")
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(weights["model.layers.1.self_attn.subln.weight"], torch.ones(16))
    assert torch.equal(logits(convert(folder, tmp_path / "back", source="unilm-v1")), logits(source))


# Attention modules alone


def one_file(name: str) -> Callable[[Path, list[Weights]], Path]:
    """Save one state dict. A template gives the prefix of each layer's names, and the file is named after it."""
    prefix, suffix = name.split("|")

    def form(folder: Path, modules: list[Weights]) -> Path:
        weights = {prefix.format(i) + key: tensor for i, module in enumerate(modules) for key, tensor in module.items()}
        save = save_file if suffix == ".safetensors" else torch.save
        save(weights, folder / f"attention{suffix}")
        return folder / f"attention{suffix}"

    return form


def many_files(folder: Path, modules: list[Weights]) -> Path:
    (folder / "modules").mkdir()
    for i, module in enumerate(modules):
        torch.save(module, folder / "modules" / f"layer_{i}.pt")
    return folder / "modules"


def pickled(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "attention.pth")
    return folder / "attention.pth"


FORMS: dict[str, Callable[[Path, list[Weights]], Path]] = {
    "numbered": one_file("{}.|.pt"),
    "layers": one_file("layers.{}.|.safetensors"),
    "self_attn": one_file("layers.{}.self_attn.|.bin"),
    "whole": one_file("model.layers.{}.self_attn.|.pt"),
    "list": pickled,
    "dictionary": lambda folder, modules: pickled(folder, {"model": dict(enumerate(modules))}),
    "files": many_files,
}


@pytest.mark.parametrize(("variant", "form"), [*(("v1", form) for form in FORMS), ("v2", "layers"), ("v2", "files")])
def test_attention_modules_alone_are_converted_in_every_form(variant: Any, form: str, tmp_path: Path) -> None:
    modules = [attention(variant, 2, seed=i) for i in range(12)]  # more than ten: layer_10 comes after layer_9
    source = FORMS[form](tmp_path, modules)
    before = snapshot(tmp_path)
    folder = convert(source, tmp_path / "dest", source=f"unilm-{variant}")
    assert {name: content for name, content in snapshot(tmp_path).items() if not name.startswith("dest")} == before
    config = DiffLlamaConfig.from_pretrained(folder)
    x = unilm.attention_inputs(config)
    expected = [
        unilm_reference.attention(x, module, layer=i, inverse_frequencies=frequencies(variant, 10000.0))
        for i, module in enumerate(modules)
    ]
    assert_close(torch.cat(expected), unilm.attention_outputs(folder, config, torch.float32, "eager")[0])
    assert verification(folder)["compared"] == "attention outputs"
    assert verification(folder)["passed"] is True
    assert len(json.loads((folder / "conversion.json").read_text())["source"]["index_sha256"]) == 64
    assert "attention.safetensors" in (folder / "README.md").read_text()


def test_one_module_is_the_first_layer_and_no_model(tmp_path: Path) -> None:
    torch.save(attention("v2", 4), tmp_path / "module.pt")
    folder = convert(tmp_path / "module.pt", tmp_path / "dest", source="unilm-v2")
    names = load_file(folder / "attention.safetensors")
    assert {name.rpartition("self_attn.")[0] for name in names} == {"model.layers.0."}
    with pytest.raises(OSError, match=r"no file named .*model\.safetensors"):
        DiffLlamaForCausalLM.from_pretrained(folder)


# Refusals


LAMBDA, FAR = "model.layers.1.self_attn.lambda_q2", "model.layers.999999999.mlp.up_proj.weight"


def broken(edits: dict[str, torch.Tensor | None], **fields: Any) -> Callable[[Path], Path]:
    """A whole model with other or missing tensors, and further fields in config.json."""
    return lambda folder: write(
        folder / "src", {name: w for name, w in (model("v1", 2) | edits).items() if w is not None}, **fields
    )


def with_config(content: str | None) -> Callable[[Path], Path]:
    """A whole model with another config.json, or without one."""

    def prepare(folder: Path) -> Path:
        file = write(folder / "src", model("v1", 2)) / "config.json"
        file.unlink()
        if content is not None:
            file.write_text(content)
        return folder / "src"

    return prepare


def files(*names: str, prefix: str = "") -> Callable[[Path], Path]:
    """A folder of attention modules in files with these names, with a prefix of the tensors' names."""

    def prepare(folder: Path) -> Path:
        (folder / "src").mkdir()
        for i, name in enumerate(names):
            weights = {prefix + key: tensor for key, tensor in attention("v1", 2, seed=i).items()}
            torch.save(weights, folder / "src" / name)
        return folder / "src"

    return prepare


REFUSALS: dict[str, tuple[Callable[[Path], Path], type[Exception], str]] = {
    "missing": (lambda folder: folder / "nowhere", FileNotFoundError, "nowhere does not exist"),
    "empty": (files(), FileNotFoundError, r"src has no weight files \(\.safetensors, \.bin, \.pt, \.pth\)"),
    "unknown tensor": (broken({"more": torch.zeros(2)}), CheckpointError, r"extra: more \[2\]"),
    "missing tensor": (broken({LAMBDA: None}), CheckpointError, rf"missing: {LAMBDA} \[8\]"),
    "misshapen": (broken({LAMBDA: torch.zeros(3)}), CheckpointError, r"lambda_q2 \[3\], must be \[8\]"),
    "no config": (with_config(None), ValueError, r"config\.json does not exist\. .*rms_norm_eps"),
    "config that is no object": (with_config("[]"), ValueError, r"config\.json"),
    "config that is no JSON": (with_config("{"), ValueError, r"config\.json"),
    "sizes that contradict": (broken({}, hidden_size=32), CheckpointError, r"\[64, 48\], must be \[64, 32\]"),
    "ours": (broken({}, model_type="diff_llama"), ValueError, "'unilm-v1' or without it, got 'diff_llama'"),
    "other variant": (broken({}, diff_variant="v2"), ValueError, "`diff_variant` must be 'v1', got 'v2'"),
    "biases": (broken({}, attention_bias=True), ValueError, "`attention_bias` must be False, got True"),
    "activation": (broken({}, hidden_act="gelu"), ValueError, "`hidden_act` must be 'silu', got 'gelu'"),
    "a layer far away": (
        broken({FAR: torch.zeros(2)}), ValueError, r"`num_hidden_layers` in .*src/config\.json .* got 1000000000"
    ),
    "more layers than tensors": (
        broken({}, num_hidden_layers=4000), CheckpointError, "is 4,000, but the number of tensors is only 4"
    ),
    "names without layers": (files("a.pt", "z.pt"), CheckpointError, r"numbers of their layers.*a\.pt.*z\.pt"),
    "a name without a layer": (files("a.pt", "l0.pt"), CheckpointError, r"numbers of their layers.*a\.pt.*l0\.pt"),
    "a layer's file missing": (files("l0.pt", "l2.pt"), CheckpointError, r"numbers of their layers.*l0\.pt.*l2\.pt"),
    "a layer twice": (files("l1.pt", "m1.pt"), CheckpointError, r"numbers of their layers.*l1\.pt.*m1\.pt"),
    "a tensor twice": (files("l0.pt", "l1.pt", prefix="0."), CheckpointError, r"Two files in .* the tensor model"),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSALS)
def test_what_is_no_such_model_is_refused_and_nothing_is_written(refused: str, tmp_path: Path) -> None:
    prepare, error, message = REFUSALS[refused]
    source = prepare(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(error, match=f"(?s){message}"):
        convert(source, tmp_path / "dest", source="unilm-v1")
    assert snapshot(tmp_path) == before


def test_v2_read_as_v1_names_the_tensors_of_v1(tmp_path: Path) -> None:
    torch.save(attention("v2", 2), tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match=r"(?s)not unilm-v1.*lambda_q1.*0?q_proj\.weight \[128, 48\]"):
        convert(tmp_path / "module.pt", tmp_path / "dest", source="unilm-v1")


@pytest.mark.parametrize(
    ("variant", "fields", "named"),
    [
        ("v2", {}, "`diff_variant` must be 'v1', got 'v2'"),
        ("v1", {"lambda_init": 0.5}, "`lambda_init` must be 'exponential', got 0.5"),
        ("v1", {"num_noise_heads": 2}, "`num_noise_heads` must be 4, got 2"),
        ("v1", {"head_norm_eps": 1e-6}, "`head_norm_eps` must be 1e-05, got 1e-06"),
        ("v1", {"hidden_act": "poly_norm"}, "`hidden_act` must be 'silu', got 'poly_norm'"),
        ("v1", {"gated_mlp": False}, "`gated_mlp` must be True, got False"),
        ("v1", {"head_norm": False}, "`head_norm` must be True"),
        ("v1", {"use_qk_norm": True}, "`use_qk_norm` must be False"),
        ("v1", {"no_rope_layers": [0, 1]}, "`no_rope_layers` must be None"),
        ("v1", {"sliding_window": 4}, "`sliding_window` must be None, got 4"),
        ("v1", {"attention_out_bias": True}, "`attention_out_bias` must be False"),
        ("v1", {"mlp_bias": True}, "`mlp_bias` must be False, got True"),
    ],
    ids=str,
)
def test_what_unilms_modules_lack_is_refused_by_name(
    variant: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    source = save_model(tmp_path / "src", tiny_config(variant, **fields))
    with pytest.raises(ValueError, match=f"cannot be converted to a model in unilm-v1's layout.*{named}"):
        convert(source, tmp_path / "dest", target="unilm-v1")
    assert not (tmp_path / "dest").exists()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    variant=st.sampled_from(VARIANTS),
    key_value_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    d=st.sampled_from([2, 4, 6]),
    hidden=st.integers(1, 9),
    tied=st.booleans(),
)
def test_maps_are_inverse_to_each_other_for_all_shapes(
    variant: str, key_value_heads: int, groups: int, d: int, hidden: int, tied: bool
) -> None:
    sizes = {"num_key_value_heads": key_value_heads, "num_attention_heads": 2 * key_value_heads * groups}
    config = tiny_config(variant, **sizes, head_dim=2 * d, hidden_size=hidden, tie_word_embeddings=tied)
    ours = {name: torch.randn(tensor.shape) for name, tensor in expected_tensors(config).items()}
    back = apply(apply(ours, TO_UNILM[variant], config), FROM_UNILM[variant, "grouped"], config)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cast_is_verified_against_the_rounded_source(variant: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "src", tiny_config(variant))
    there = convert(source, tmp_path / "there", target=f"unilm-{variant}", dtype="bfloat16", verify=True)
    convert(source, tmp_path / "unilm", target=f"unilm-{variant}", verify=False)
    back = convert(tmp_path / "unilm", tmp_path / "back", source=f"unilm-{variant}", dtype="bfloat16", verify=True)
    for result in map(verification, (there, back)):
        assert result["max_difference"] <= 1e-5 * result["largest_output"]
