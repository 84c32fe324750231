import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffllama import DiffLlamaConfig, convert
from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.models import expected_tensors
from diffllama.conversion import motif, motif_reference
from diffllama.conversion.motif import FROM_MOTIF, TO_MOTIF, translate
from diffllama.conversion.weight_map import plan
from support.llama_checkpoints import add_tokenizer, edit_config, edit_weights, save_model, snapshot, verification
from support.tiny_models import tiny_config, tokens


FIELDS: dict[str, Any] = {
    "architectures": ["MotifForCausalLM"], "model_type": "Motif", "vocab_size": 97, "hidden_size": 48,
    "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-4, "attn_rms_norm_eps": 1e-3, "rope_theta": 5000.0,
    "rope_scaling": None, "hidden_act": "poly_norm", "initializer_range": 0.03, "attention_dropout": 0.0,
    "use_cache": True, "tie_word_embeddings": True, "bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": None,
    "torch_dtype": "float32", "use_bias": False,
}  # fmt: skip
GROUPS = {"num_attention_heads": 10, "num_noise_heads": 2, "head_dim": 8, "k_ratio": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, dict[str, Any]] = {
    "pairs": {},  # as Motif-2.6B
    "groups": GROUPS | {"tie_word_embeddings": False},  # as Motif-2-12.7B
    "pairs-grouped-queries": {"num_noise_heads": 2, "num_key_value_heads": 2, "k_ratio": 1, "rope_scaling": YARN},
    "groups-grouped-queries": GROUPS | {"num_key_value_heads": 2},
}
"""Fields besides `FIELDS`."""
LAYER = "model.layers.{}."
Weights = dict[str, torch.Tensor]


def weights(fields: dict[str, Any]) -> Weights:
    """Return random weights under Motif's names."""
    hidden, intermediate = fields["hidden_size"], fields["intermediate_size"]
    heads, keys = fields["num_attention_heads"], fields["num_key_value_heads"]
    noise_heads = fields.get("num_noise_heads", heads // 2)
    d = fields.get("head_dim", hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, hidden), "model.norm.weight": (hidden,)}
    if not fields["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (97, hidden)
    for i in range(fields["num_hidden_layers"]):
        attention = {f"lambda_{name}": (d,) for name in ("q1", "k1", "q2", "k2")} | {
            "q_proj.weight": (heads * d, hidden),
            "k_proj.weight": (keys * d, hidden),
            "v_proj.weight": (keys * d, hidden),
            "o_proj.weight": (hidden, (heads - noise_heads) * 2 * d),
            "subln.weight": (2 * d,),
        }
        mlp = {"gate_proj.weight": (intermediate, hidden), "up_proj.weight": (intermediate, hidden)} | {
            "down_proj.weight": (hidden, intermediate), "act_fn.weight": (3,), "act_fn.bias": (1,),
        }  # fmt: skip
        layer = LAYER.format(i)
        shapes |= {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"{layer}mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    return {
        name: ("norm" in name or "subln" in name) + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def write(folder: Path, **fields: Any) -> Path:
    """Save a small Motif with random weights."""
    folder.mkdir()
    save_file(weights(FIELDS | fields), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    return folder


convert_from = partial(convert, source="motif")


@pytest.mark.parametrize("case", [case for case in CASES if "rope_scaling" not in CASES[case]])
def test_logits_are_those_of_motifs_formulas(case: str, tmp_path: Path) -> None:
    source = write(tmp_path / "src", **CASES[case])
    add_tokenizer(source)
    folder = convert_from(source, tmp_path / "dest", verify=True)
    stored = load_file(source / "model.safetensors")
    d = len(stored["model.layers.0.self_attn.lambda_q1"])
    expected = motif_reference.motif_logits(
        tokens(2, 24), {name: tensor.double() for name, tensor in stored.items()}, rms_norm_eps=1e-4,
        attn_rms_norm_eps=1e-3, inverse_frequencies=5000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d),
    )  # fmt: skip
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(tokens(2, 24)).logits
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    result = verification(folder)
    assert (result["passed"], result["tolerance"]) == (True, 1e-5)
    record = json.loads((folder / "conversion.json").read_text())["source"]
    assert (record["format"], record["model_type"]) == ("motif", "Motif")
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize(("case", "dtype"), [(case, "bfloat16" if case == "groups" else "float32") for case in CASES])
def test_conversion_there_and_back_gives_the_same_file_and_fields(case: str, dtype: str, tmp_path: Path) -> None:
    source = write(tmp_path / "src", **CASES[case], torch_dtype=dtype)
    edit_weights(
        source,
        lambda weights: weights.update({name: w.to(getattr(torch, dtype)) for name, w in weights.items()}),
    )
    there = convert_from(source, tmp_path / "there", verify=True)
    back = convert(there, tmp_path / "back", target="motif", verify=True)
    assert verification(back)["passed"] is True
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    assert new == old | ({"rope_scaling": YARN} if "rope_scaling" in CASES[case] else {})
    assert not list(back.glob("*.py"))


def test_what_config_json_leaves_open_follows_from_the_rest(tmp_path: Path) -> None:
    source = write(tmp_path / "src")
    fields = json.loads((source / "config.json").read_text())
    for name in ("tie_word_embeddings", "attn_rms_norm_eps", "eos_token_id", "rope_scaling", "torch_dtype"):
        del fields[name]
    (source / "config.json").write_text(json.dumps(fields | {"num_noise_heads": None, "head_dim": None}))
    config = DiffLlamaConfig.from_pretrained(convert_from(source, tmp_path / "dest"))
    assert (config.tie_word_embeddings, config.head_norm_eps, config.eos_token_id) == (True, 1e-5, None)
    assert (config.num_noise_heads, config.num_key_value_heads, config.head_dim) == (2, 2, 24)
    assert config.lambda_init == pytest.approx([0.8 - 0.6 * math.exp(0.3), 0.2, 0.8 - 0.6 * math.exp(-0.3)])


# Published sizes, without values

SIZES_2_6B = {
    "vocab_size": 219520, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 16384, "rope_theta": 500000.0,
}  # fmt: skip
SIZES_12_7B = {
    "vocab_size": 219520, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 16, "head_dim": 128, "num_noise_heads": 8, "k_ratio": 1,
    "rope_theta": 1000000.0, "tie_word_embeddings": False,
}  # fmt: skip


def published(sizes: dict[str, Any]) -> tuple[Weights, Weights]:
    """Return Motif's tensors and ours, on the meta device."""
    config = DiffLlamaConfig(**translate(FIELDS | sizes))
    ours = expected_tensors(config)
    theirs = {name: step.result for name, step in plan(ours, TO_MOTIF, config).items()}
    again = {name: step.result for name, step in plan(theirs, FROM_MOTIF, config).items()}
    assert [(name, w.shape) for name, w in again.items()] == [(name, w.shape) for name, w in ours.items()]
    return theirs, ours


def file_bytes(tensors: Weights) -> int:
    """Compute the size of a safetensors file: 8 bytes, a header padded to a multiple of 8, values."""
    end, header = 0, {"__metadata__": {"format": "pt"}}
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [end, end := end + tensor.nbytes]}
    return 8 + math.ceil(len(json.dumps(header, separators=(",", ":"))) / 8) * 8 + end


def test_shards_of_2_6b_have_the_published_sizes() -> None:
    theirs, _ = published(SIZES_2_6B)
    assert len(theirs) == 514
    split = split_torch_state_dict_into_shards(theirs, max_shard_size="5GB")
    sizes = [file_bytes({name: theirs[name] for name in sorted(names)}) for names in split.filename_to_tensors.values()]
    assert sizes == [4_952_662_512, 4_966_459_400, 469_808_712]


def test_12_7b_has_the_published_tensors() -> None:
    theirs, ours = published(SIZES_12_7B)
    for tensors in (theirs, ours):
        assert (len(tensors), sum(w.numel() for w in tensors.values())) == (643, 12_703_860_896)
    shapes = {name: [*theirs[f"model.layers.39.self_attn.{name}_proj.weight"].shape] for name in "qkvo"}
    assert shapes == {"q": [5120, 4096], "k": [2048, 4096], "v": [2048, 4096], "o": [4096, 8192]}


# Refusals


def fields(message: str, error: type[Exception] = ValueError, **edits: Any) -> tuple[Any, type[Exception], str]:
    """Refusal of fields in config.json; `...` removes a field. Most are refused before weights are opened."""

    def edit(source: Path) -> None:
        content = json.loads((source / "config.json").read_text()) | edits
        (source / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
        if error is not CheckpointError:
            (source / "model.safetensors").unlink()

    return edit, error, message


def tensors(message: str, edit: Callable[[Weights], Any]) -> tuple[Any, type[Exception], str]:
    """Refusal of weights."""
    return lambda source: edit_weights(source, edit), CheckpointError, message


ACT_FN = "model.layers.1.mlp.act_fn.weight"
REFUSALS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "Motif 3": fields(r"src/config\.json: `mhc_enabled` is a field of Motif 3", mhc_enabled=True),
    "latent attention": fields("`kv_lora_rank` is a field of Motif 3", kv_lora_rank=512, mhc_enabled=False),
    "experts": fields("`num_experts` is a field of Motif 3", num_experts=8),
    "another model": fields(r"`model_type` in .*config\.json must be 'Motif', got 'llama'", model_type="llama"),
    "quantized": fields("quantized .*quantization_config", quantization_config={"quant_method": "fp8"}),
    "groups without their size": fields(
        r"`num_noise_heads` is missing: 40 query heads on 16 keys .* add `num_noise_heads`: 20\.",
        num_attention_heads=40, num_key_value_heads=16,
    ),
    "heads that make no groups": fields("num_attention_heads.*num_noise_heads", Exception, num_noise_heads=3),
    "groups that straddle values": fields(
        "num_key_value_heads.*num_noise_heads", Exception, num_noise_heads=1, num_key_value_heads=4
    ),
    "odd keys": fields("`num_key_value_heads` must be even .* got 3", num_key_value_heads=3, num_noise_heads=1),
    "no width": fields("`head_dim` is missing", num_attention_heads=5, num_noise_heads=1),
    "ratio of keys": fields("`k_ratio` must be 1, got 2", k_ratio=2),
    "activation": fields("`hidden_act` must be 'poly_norm', got 'silu'", hidden_act="silu"),
    "biases and windows": fields(
        "`use_bias` must be False, got True; `use_sliding_window` must be False, got True",
        use_bias=True, use_sliding_window=True,
    ),
    "missing fields": fields(
        r"these fields are missing: `hidden_act`, `rms_norm_eps`\.|`rms_norm_eps`, `hidden_act`\.",
        rms_norm_eps=..., hidden_act=...,
    ),
    "no theta": fields("missing: `rope_theta`", rope_theta=...),
    "unknown rotation": fields("rope_type.*'nonesuch'", Exception, rope_scaling={"rope_type": "nonesuch"}),
    "a million layers": fields("`num_hidden_layers` in .* got 1000000", num_hidden_layers=10**6),
    "more layers than tensors": fields("is 4,000, .* only 5", CheckpointError, num_hidden_layers=4000),
    "no activation's weight": tensors(rf"missing: {ACT_FN} \[3\]$", lambda weights: weights.pop(ACT_FN)),
    "unknown tensor": tensors(r"extra: more \[2\]", lambda weights: weights.update(more=torch.zeros(2))),
    "adapter": (lambda source: (source / "adapter_config.json").touch(), ValueError, "an adapter beside its model"),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSALS)
def test_what_is_no_motif_2_is_refused_and_nothing_is_written(refused: str, tmp_path: Path) -> None:
    edit, error, message = REFUSALS[refused]
    source = write(tmp_path / "src")
    edit(source)
    before = snapshot(tmp_path)
    with pytest.raises(error, match=f"(?s){message}"):
        convert_from(source, tmp_path / "dest")
    assert snapshot(tmp_path) == before


def test_file_is_no_motif(tmp_path: Path) -> None:
    (tmp_path / "motif.gguf").touch()
    with pytest.raises(ValueError, match=r"motif\.gguf is not a folder"):
        convert_from(tmp_path / "motif.gguf", tmp_path / "dest")


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    source = write(tmp_path / "src", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (source / "evil.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    add_tokenizer(source)
    edit_config(source)
    folder = convert_from(source, tmp_path / "dest", verify=True)
    assert not (tmp_path / "run").exists()
    assert not (folder / "evil.py").exists()


OURS: dict[str, Any] = {"hidden_act": "poly_norm", "lambda_init": motif.lambda_init(2)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"diff_variant": "v2"}, "cannot be converted to Motif: `diff_variant` must be 'v1', got 'v2'"),
        ({"lambda_init": "exponential"}, r"`lambda_init` must be \[-0\.00\d+, 0\.2\d*\], got 'exponential'"),
        ({"lambda_init": [0.0, 0.2]}, r"got \[0\.0, 0\.2\]"),
        ({"hidden_act": "silu"}, "`hidden_act` must be 'poly_norm', got 'silu'"),
        ({"gated_mlp": False}, "`gated_mlp` must be True, got False"),
        ({"head_norm": False}, "`head_norm` must be True"),
        ({"head_norm_affine": False}, "`head_norm_affine` must be True"),
        ({"attention_bias": True}, "`attention_bias` must be False.*; `attention_out_bias` must be False"),
        ({"mlp_bias": True}, "`mlp_bias` must be False"),
        ({"use_qk_norm": True}, "`use_qk_norm` must be False"),
        ({"no_rope_layers": [1, 0]}, r"`no_rope_layers` must be None"),
        ({"sliding_window": 8}, "`sliding_window` must be None, got 8"),
    ],
    ids=str,
)
def test_what_motif_lacks_is_refused_by_name(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    variant = fields.get("diff_variant", "v1")
    ours = {name: value for name, value in (OURS | fields).items() if name != "diff_variant"}
    source = save_model(tmp_path / "src", tiny_config(variant, **ours))
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=named):
        convert(source, tmp_path / "dest", target="motif")
    assert snapshot(tmp_path) == before


def test_lambda_init_may_differ_by_a_rounding(tmp_path: Path) -> None:
    rounded = [torch.tensor(number).item() for number in OURS["lambda_init"]]
    assert rounded != OURS["lambda_init"]
    source = save_model(tmp_path / "src", tiny_config(**OURS | {"lambda_init": rounded}))
    assert verification(convert(source, tmp_path / "dest", target="motif", verify=True))["passed"] is True
