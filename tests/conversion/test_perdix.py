import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffllama import DiffLlamaConfig, convert
from diffllama.checkpoints.errors import CheckpointError
from diffllama.checkpoints.models import expected_tensors
from diffllama.conversion import motif_reference
from diffllama.conversion.perdix import FROM_PERDIX, translate
from diffllama.conversion.weight_map import inverse, plan
from support.llama_checkpoints import edit_config, edit_weights, snapshot, verification
from support.tiny_models import tokens


FIELDS: dict[str, Any] = {
    "architectures": ["PerdixForCausalLM"], "model_type": "perdix", "vocab_size": 97, "dim": 48, "n_layers": 3,
    "n_heads": 3, "ffn_dim": 40, "max_seq_len": 64, "rope_theta": 5000.0, "norm_eps": 1e-3, "init_std": 0.02,
    "bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 1, "use_cache": False, "dtype": "float32",
    "auto_map": {"AutoConfig": "configuration_perdix.PerdixConfig"},
}  # fmt: skip
D = 16  # 48 / 3
ACTIVATION = "blocks.1.ffn.act.weight"


def write(folder: Path, tied: bool = True) -> Path:
    """Save a small Perdix with random weights."""
    shapes: dict[str, tuple[int, ...]] = {"tok_emb.weight": (97, 48), "final_norm.weight": (48,)}
    for i in range(3):
        layer = {f"attn.{name}.weight": (48, 48) for name in ("wq", "wk", "wv", "wo")} | {
            **{f"attn.lambda_{name}": (D // 2,) for name in ("q1", "k1", "q2", "k2")}, "attn.subln.weight": (D,),
            "ffn.up.weight": (40, 48), "ffn.down.weight": (48, 40), "ffn.act.weight": (3,), "ffn.act.bias": (1,),
            "attn_norm.weight": (48,), "ffn_norm.weight": (48,),
        }  # fmt: skip
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    if not tied:
        shapes["lm_head.weight"] = (97, 48)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: ("norm" in name or "subln" in name) + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FIELDS))
    return folder


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_are_those_of_perdixs_formulas(tied: bool, tmp_path: Path) -> None:
    source = write(tmp_path / "src", tied)
    folder = convert(source, tmp_path / "dest", source="perdix", verify=True)
    expected = motif_reference.perdix_logits(
        tokens(2, 24), {name: w.double() for name, w in load_file(source / "model.safetensors").items()}, norm_eps=1e-3,
        inverse_frequencies=5000.0 ** (-torch.arange(0, D // 2, 2, dtype=torch.float64) / (D // 2)),
    )  # fmt: skip
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(tokens(2, 24)).logits
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (verification(folder)["passed"], verification(folder)["tolerance"]) == (True, 1e-5)
    config = DiffLlamaConfig.from_pretrained(folder)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_id) == (tied, 0, 5)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.head_norm_eps) == (64, 1e-3, 1e-3)


def test_published_sizes_have_the_published_number_of_parameters() -> None:
    sizes = {"vocab_size": 49152, "dim": 2048, "n_layers": 20, "n_heads": 16, "ffn_dim": 8192}
    config = DiffLlamaConfig(**translate(FIELDS | sizes | {"tie_word_embeddings": True}))
    ours = expected_tensors(config)
    theirs = {name: step.result for name, step in plan(ours, inverse(FROM_PERDIX), config).items()}
    assert len(theirs) == len(ours)
    assert round(sum(tensor.numel() for tensor in theirs.values()) / 1e6) == 1107


@pytest.mark.parametrize(
    ("fields", "edit", "error", "message"),
    [
        ({"model_type": "Motif"}, None, ValueError, "`model_type` in .* must be 'perdix', got 'Motif'"),
        ({"n_heads": None, "norm_eps": None}, None, ValueError, "fields are missing: `norm_eps`, `n_heads`"),
        ({"n_heads": 5}, None, ValueError, "`dim` must be a multiple of `n_heads`, got 48 and 5"),
        ({"n_layers": 4000}, None, CheckpointError, "is 4,000, .* only 47"),
        ({}, lambda w: w.pop(ACTIVATION), CheckpointError, rf"missing: {ACTIVATION} \[3\]$"),
        (
            {},
            lambda w: w.update({"blocks.0.ffn.gate.weight": torch.ones(2)}),
            CheckpointError,
            r"extra: .*gate\.weight",
        ),
    ],
    ids=["other model", "missing fields", "heads", "layers", "missing tensor", "unknown tensor"],
)
def test_what_is_no_perdix_is_refused_and_nothing_is_written(
    fields: dict[str, Any], edit: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "src")
    edit_config(source, **fields)
    if edit:
        edit_weights(source, edit)
    before = snapshot(tmp_path)
    with pytest.raises(error, match=f"(?s){message}"):
        convert(source, tmp_path / "dest", source="perdix")
    assert snapshot(tmp_path) == before
