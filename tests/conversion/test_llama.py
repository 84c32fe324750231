import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from llamas import CHAT_TEMPLATE, REFUSALS, Refusal, add_tokenizer, edit_config, edit_weights, llama, prepared, snapshot
from safetensors.torch import load_file
from tiny import tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import diffllama.conversion
from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM
from diffllama.conversion import convert
from diffllama.conversion.llama import WEIGHT_MAP, convert_config, new_weights
from diffllama.conversion.weight_map import apply_weight_map
from diffllama.modeling_diff import modeling_diffllama
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP


CASES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa-tied": {"tie_word_embeddings": True},
    "mqa-biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 24, "hidden_act": "gelu", "rms_norm_eps": 1e-3},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
        }
    },
}
DTYPES = ("float32", "bfloat16")
CODE = ("configuration_diffllama.py", "differential_attention.py", "modeling_diffllama.py")
ONE = "model.layers.0.self_attn."


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits of two rows, the second one padded on the left."""
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    with torch.no_grad():
        return model.eval()(input_ids=tokens(2, 24), attention_mask=mask).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Path]]:
    """Case and dtype -> the Llama's folder and the converted one's."""
    root, result = tmp_path_factory.mktemp("llamas"), {}
    for case, fields in CASES.items():
        source = llama(root / case, **fields)
        for dtype in DTYPES:
            result[case, dtype] = source, convert(source, root / f"{case}-{dtype}", dtype=dtype)
    return result


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama with a tokenizer and settings for generation."""
    folder = llama(tmp_path / "src")
    add_tokenizer(folder)
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[2, 3]).save_pretrained(folder)
    return folder


@pytest.fixture(params=REFUSALS)
def refusal(request: pytest.FixtureRequest) -> Refusal:
    return REFUSALS[request.param]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal_bit_for_bit(
    case: str, dtype: str, implementation: str, folders: dict[tuple[str, str], tuple[Path, Path]]
) -> None:
    original, converted = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=implementation)
        for folder in folders[case, dtype]
    )
    assert (type(original), type(converted)) == (LlamaForCausalLM, DiffLlamaForCausalLM)
    assert converted.dtype == original.dtype == getattr(torch, dtype)
    assert torch.equal(logits(converted), logits(original))


def test_logits_are_equal_where_diffllama_is_not_installed(
    folders: dict[tuple[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    code = """
import json, sys
sys.modules["diffllama"] = None
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
equal = {}
for case, dtype, source, folder in json.load(sys.stdin):
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        converted = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        ids = torch.arange(48).view(2, 24)
        same = torch.equal(converted(ids).logits, original(ids).logits)
    equal[f"{case} {dtype}"] = same and type(converted).__module__.startswith("transformers_modules.")
print(json.dumps(equal))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([[*key, str(old), str(new)] for key, (old, new) in folders.items()]),
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == {f"{case} {dtype}": True for case in CASES for dtype in DTYPES}


def test_float16_logits_are_equal_but_for_the_rounding_of_tiny_numbers(tmp_path: Path) -> None:
    original = LlamaForCausalLM.from_pretrained(llama(tmp_path / "src"), dtype="float16")
    converted = DiffLlamaForCausalLM.from_pretrained(convert(tmp_path / "src", tmp_path / "dest", dtype="float16"))
    assert converted.dtype == torch.float16
    torch.testing.assert_close(logits(converted), logits(original), rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_auto_keeps_the_dtype_of_the_source(stored: str, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(llama(tmp_path / "src"), dtype=stored).save_pretrained(tmp_path / "stored")
    folder = convert(tmp_path / "stored", tmp_path / "dest")
    assert json.loads((folder / "config.json").read_text())["dtype"] == stored
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {getattr(torch, stored)}


def test_shards_are_read(tmp_path: Path) -> None:
    source = llama(tmp_path / "src", {"max_shard_size": "30KB"})
    assert len(list(source.glob("model-*.safetensors"))) > 2
    converted = DiffLlamaForCausalLM.from_pretrained(convert(source, tmp_path / "dest"))
    assert torch.equal(logits(converted), logits(LlamaForCausalLM.from_pretrained(source)))


def test_pickled_weights_become_safetensors(source: Path, tmp_path: Path) -> None:
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    folder = convert(source, tmp_path / "dest")
    assert [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".safetensors")] == [
        "model.safetensors"
    ]
    assert torch.equal(
        logits(DiffLlamaForCausalLM.from_pretrained(folder)), logits(LlamaForCausalLM.from_pretrained(source))
    )


def test_an_output_layer_that_differs_from_tied_embeddings_is_kept(tmp_path: Path) -> None:
    source = llama(tmp_path / "src", tie_word_embeddings=True)
    edit_weights(source, lambda weights: weights.update({"lm_head.weight": torch.randn(97, 64)}))
    converted = DiffLlamaForCausalLM.from_pretrained(convert(source, tmp_path / "dest"))
    assert torch.equal(logits(converted), logits(LlamaForCausalLM.from_pretrained(source)))


def test_rotary_frequencies_that_old_checkpoints_carry_are_left_out(source: Path, tmp_path: Path) -> None:
    edit_weights(source, lambda weights: weights.update({f"{ONE}rotary_emb.inv_freq": torch.zeros(8)}))
    weights = load_file(convert(source, tmp_path / "dest") / "model.safetensors")
    assert not [name for name in weights if "inv_freq" in name]


def test_the_folder_is_complete(source: Path, tmp_path: Path) -> None:
    before = snapshot(source)
    folder = convert(str(source), str(tmp_path / "new" / "dest"))
    assert folder == tmp_path / "new" / "dest"
    assert snapshot(source) == before
    assert {file.name for file in folder.iterdir()} == {
        *CODE,
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in CODE:
        assert (folder / name).read_bytes() == Path(modeling_diffllama.__file__).with_name(name).read_bytes()


def test_the_folders_configuration_is_the_sources_as_v2(source: Path, tmp_path: Path) -> None:
    edit_config(source, rms_norm_eps=1e-4, auto_map={"AutoConfig": "other.Code"}, bos_token_id=5)
    written = json.loads((convert(source, tmp_path / "dest") / "config.json").read_text())
    assert written["auto_map"] == AUTO_MAP
    assert (written["model_type"], written["diff_variant"]) == ("diff_llama", "v2")
    assert written["architectures"] == ["DiffLlamaForCausalLM"]
    assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (8, 2, 16)
    assert (written["rms_norm_eps"], written["bos_token_id"], written["hidden_size"]) == (1e-4, 5, 64)


def test_the_folder_generates_and_tokenizes_as_the_source_does(source: Path, tmp_path: Path) -> None:
    folder = convert(source, tmp_path / "dest")
    settings = DiffLlamaForCausalLM.from_pretrained(folder).generation_config
    assert (settings.do_sample, settings.temperature, settings.top_p) == (True, 0.6, 0.9)
    assert settings.eos_token_id == [2, 3]
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(folder)
    assert new("w13 w15 nonesuch").input_ids == old("w13 w15 nonesuch").input_ids == [13, 15, 3]
    messages = [{"role": "user", "content": "w7"}]
    assert new.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "w1 w7 w2"


def test_settings_of_generation_that_contradict_each_other_are_no_obstacle(source: Path, tmp_path: Path) -> None:
    settings = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}  # as meta-llama/Llama-2-7b-hf has them
    (source / "generation_config.json").write_text(json.dumps(settings))
    try:
        LlamaForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "again")
    except ValueError:
        pytest.skip("this version of transformers saves no model with such settings")
    written = json.loads((convert(source, tmp_path / "dest") / "generation_config.json").read_text())
    assert {name: written[name] for name in settings} == settings


def test_the_card_has_metadata_and_numbers_of_the_model(source: Path, tmp_path: Path) -> None:
    folder = convert(source, tmp_path / "dest")
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags == ["diffllama", "differential-attention", "diff-v2"]
    assert f"| parameters | {DiffLlamaForCausalLM.from_pretrained(folder).num_parameters():,} |" in card.text
    assert "messages = [" in card.text
    assert "{" + "{" not in card.text


@pytest.mark.parametrize("chat", [True, False])
def test_the_card_shows_chat_only_where_the_tokenizer_has_a_template(chat: bool, tmp_path: Path) -> None:
    source = llama(tmp_path / "src")
    add_tokenizer(source, CHAT_TEMPLATE if chat else None)
    text = (convert(source, tmp_path / "dest") / "README.md").read_text()
    assert ("messages = [" in text) is chat


def test_a_source_without_tokenizer_gives_a_folder_without(tmp_path: Path) -> None:
    folder = convert(llama(tmp_path / "src"), tmp_path / "dest")
    assert not [file.name for file in folder.iterdir() if "token" in file.name]
    assert (folder / "README.md").is_file()


def test_progress_is_told_after_each_tensor(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    convert(source, tmp_path / "dest", progress=lambda done, total: told.append((done, total)))
    assert told == [(n, 21) for n in range(1, 22)]


def test_training_tells_the_two_maps_of_a_head_apart(source: Path, tmp_path: Path) -> None:
    model = DiffLlamaForCausalLM.from_pretrained(convert(source, tmp_path / "dest"))
    ids = tokens(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    first, second = model.model.layers[0].self_attn.q_proj.weight.grad.view(4, 2, 16, 64).unbind(1)
    assert first.abs().max() > 0
    torch.testing.assert_close(second, -first / 2)


@pytest.fixture
def with_biases() -> Iterator[tuple[LlamaForCausalLM, DiffLlamaConfig]]:
    """A Llama with every tensor that a Llama can have, on the meta device, and what it becomes."""
    fields = {"hidden_size": 64, "num_hidden_layers": 11, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, intermediate_size=96, attention_bias=True, mlp_bias=True, **fields)
    with torch.device("meta"):
        yield LlamaForCausalLM(config), convert_config(config)


def test_the_weight_map_makes_every_tensor_of_ours(with_biases: tuple[LlamaForCausalLM, DiffLlamaConfig]) -> None:
    model, config = with_biases
    made = apply_weight_map(model.state_dict(), WEIGHT_MAP, config)
    new = new_weights(config, torch.float32)
    assert not made.keys() & new.keys()
    expected = DiffLlamaForCausalLM(config).state_dict()
    assert {name: w.shape for name, w in (made | new).items()} == {name: w.shape for name, w in expected.items()}


@pytest.mark.parametrize("name", WEIGHT_MAP)
def test_no_rule_of_the_weight_map_is_idle(name: str, with_biases: tuple[LlamaForCausalLM, DiffLlamaConfig]) -> None:
    model, config = with_biases
    rules = {key: rule for key, rule in WEIGHT_MAP.items() if key != name}
    with pytest.raises(ValueError, match="no rule for tensor"):
        apply_weight_map(model.state_dict(), rules, config)


def test_queries_are_doubled_as_neighbours_and_outputs_are_twice_as_large(source: Path, tmp_path: Path) -> None:
    old = load_file(source / "model.safetensors")
    new = load_file(convert(source, tmp_path / "dest") / "model.safetensors")
    heads = old[f"{ONE}q_proj.weight"].view(4, 16, 64)
    assert torch.equal(new[f"{ONE}q_proj.weight"].view(4, 2, 16, 64), torch.stack((heads, heads), 1))
    assert torch.equal(new[f"{ONE}o_proj.weight"], 2 * old[f"{ONE}o_proj.weight"])
    assert new[f"{ONE}lambda_proj.weight"].shape == (4, 64)
    assert torch.count_nonzero(new[f"{ONE}lambda_proj.weight"]) == 0


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_what_cannot_be_converted_is_refused_and_nothing_changes(
    refusal: Refusal, overwrite: bool, tmp_path: Path
) -> None:
    source, dest = prepared(refusal, tmp_path)
    if overwrite and refusal.dest == "dest":
        dest.mkdir(exist_ok=True)
        (dest / "config.json").write_text("an older model")
    before = snapshot(tmp_path)
    overwrite = overwrite and refusal.even_to_overwrite
    with pytest.raises(refusal.error, match=f"(?s){refusal.message}"):
        convert(source, dest, overwrite=overwrite)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "`dtype` must be 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'"),
        ({"dtype": torch.float32}, "`dtype` must be .* got torch.float32"),
        ({"source": "gpt2"}, "Unknown source 'gpt2'. Known: llama"),
    ],
    ids=str,
)
def test_an_unknown_option_is_refused_with_the_known_ones(
    options: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "dest", **options)
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_file_without_the_packages_it_needs_says_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffllama.conversion, f"is_{package}_available", lambda: False)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ImportError, match=r"pip install 'diffllama\[gguf\]'"):
        convert(tmp_path / "x.gguf", tmp_path / "dest")


@pytest.mark.parametrize(("inside", "around"), [("src", "src/new"), ("folder/src", "folder")])
def test_a_link_does_not_hide_that_source_and_destination_overlap(inside: str, around: str, tmp_path: Path) -> None:
    llama(tmp_path / "real" / inside)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = snapshot(tmp_path)
    with pytest.raises(FileExistsError, match="overlap"):
        convert(tmp_path / "link" / inside, tmp_path / "real" / around, overwrite=True)
    assert snapshot(tmp_path) == before


def test_an_empty_folder_may_be_the_destination(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    assert (convert(source, tmp_path / "dest") / "config.json").is_file()


def test_overwriting_leaves_nothing_of_the_old_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dest" / "old").mkdir(parents=True)
    (tmp_path / "dest" / "config.json").write_text("old")
    (tmp_path / "dest" / "model-00001-of-00002.safetensors").write_text("old")
    convert(source, tmp_path / "dest", overwrite=True)
    fresh = convert(source, tmp_path / "fresh")
    assert snapshot(tmp_path / "dest") == snapshot(fresh)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dest", "fresh", "src"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("older", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize(
    "step", ["DiffLlamaForCausalLM.save_pretrained", "AutoTokenizer.from_pretrained", "converted_card"]
)
def test_a_failure_in_the_middle_changes_nothing(
    step: str, older: bool, error: BaseException, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        if step.endswith("save_pretrained"):
            (args[1] / "config.json").write_text("half of it")
        raise error

    if older:
        (tmp_path / "dest").mkdir()
        (tmp_path / "dest" / "config.json").write_text("an older model")
    before = snapshot(tmp_path)
    monkeypatch.setattr(f"diffllama.conversion.{step}", fail)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "dest", overwrite=older)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("refused", ["other model", "quantized", "partly rotated", "occupied dest", "dest in src"])
def test_no_weights_are_read_before_it_is_refused(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dest = prepared(REFUSALS[refused], tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda **_: pytest.fail("weights were read"))
    with pytest.raises(REFUSALS[refused].error, match=REFUSALS[refused].message):
        convert(source, dest)
