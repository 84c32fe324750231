"""`diffllama memory` returns the memory that PyTorch and the caches of transformers take."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from diffllama import DiffLlamaConfig, DiffLlamaForCausalLM
from diffllama.cli import app
from diffllama.configuration import preset
from diffllama.memory import memory, read_config
from support.llama_checkpoints import SIZES
from support.tiny_models import VARIANTS, paged, tiny_config, tiny_model, tokens


WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 4096}


def kept(cache: DynamicCache) -> int:
    """Return the bytes of a cache's keys and values."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


@torch.no_grad()
def most_allocated(model: PreTrainedModel, ids: torch.Tensor) -> tuple[int, int]:
    """Return the peak bytes of PyTorch while a model reads a prompt, and the bytes of the resulting cache."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, kept(cache)


GROUPED = {"num_attention_heads": 10, "num_noise_heads": 2}


@pytest.mark.parametrize(
    "fields", [{}, {"tie_word_embeddings": True}, GROUPED | {"hidden_act": "poly_norm", "gated_mlp": False}], ids=str
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_those_of_the_model(variant: str, fields: dict[str, Any]) -> None:
    config = tiny_config(variant, **fields)
    parameters = sum(parameter.numel() for parameter in DiffLlamaForCausalLM(config).parameters())
    assert memory(config, 10).weights == 4 * parameters
    assert memory(config, 10, dtype="bfloat16").weights == 2 * parameters


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_and_values_are_those_of_a_cache(variant: str, batch: int, window: int | None) -> None:
    fields: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]} if window else {}
    model = tiny_model(variant, sliding_window=window, **fields)
    cache = model(tokens(batch, 40), use_cache=True).past_key_values
    estimate = memory(model.config, 40, batch)
    spare = batch * estimate.cache_per_token // 2 if window else 0  # a sliding layer stores what the next token sees
    assert kept(cache) == estimate.cache - spare


@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_cache_takes_the_stated_bytes_per_token(variant: str) -> None:
    model = tiny_model(variant, attn_implementation="sdpa")
    with model.continuous_batching_context_manager(continuous_batching_config=paged(8, 16)) as manager:
        manager.add_request(tokens(1, 5)[0].tolist(), max_new_tokens=2)
        manager.get_result()
        cache = manager.batch_processor.cache
        held = cache.num_blocks * 16
        if hasattr(cache, "cache_tensor"):  # one tensor for all layers, with two unused sectors
            size = cache.cache_tensor.nbytes - 2 * cache.bytes_per_sector
        else:
            layers = [*cache.key_cache, *cache.value_cache]
            size = sum(tensor.nbytes for tensor in layers)
            held = layers[0].shape[0]
    assert size == held * memory(model.config, 1).cache_per_token


@pytest.mark.parametrize(
    ("variant", "dtype", "fields"),
    [
        *product(VARIANTS, ["float32", "bfloat16"], [{"intermediate_size": 128}, GROUPED | {"intermediate_size": 128}]),
        ("v1", "float32", {"intermediate_size": 1024}),
        ("v2", "bfloat16", {"intermediate_size": 1024}),
        *product(["v1"], ["float32", "bfloat16"], [{"intermediate_size": 1024, "hidden_act": "poly_norm"} | GROUPED]),
        *product(["v1"], ["float32", "bfloat16"], [{"intermediate_size": 2048, "gated_mlp": False}]),
    ],
    ids=str,
)
def test_activations_are_about_what_reading_a_prompt_takes(
    variant: str, dtype: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # on some processors it copies its operands
    model = tiny_model(variant, getattr(torch, dtype), "sdpa", **(WIDE | fields))
    ids = tokens(2, 1024)
    model(ids[:, :8])
    most, cache = most_allocated(model, ids)
    estimate = memory(model.config, 1024, 2, dtype)
    assert cache == estimate.cache
    assert most - cache == pytest.approx(estimate.activations, rel=0.02)


@pytest.mark.parametrize("name", ["Mistral", "Qwen3", "Phi3", "Gemma2"])
def test_relatives_of_llama_take_what_is_told(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    estimate = memory(config, 12, dtype="float32")
    assert estimate.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert estimate.cache == kept(model(tokens(1, 12), use_cache=True).past_key_values)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepseekV3", "self_attn.q_a_proj.weight"),  # compressed keys and values
        ("Mixtral", "mlp.gate.weight"),  # mixture of experts
        ("GptOss", "mlp.router.weight"),
        ("Lfm2", "self_attn.out_proj.weight"),
        ("FalconH1", "`layer_types` contain hybrid"),
        ("Gemma4Text", "its layers differ"),
    ],
)
def test_models_of_another_build_are_refused(name: str, reason: str) -> None:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("not in this version of transformers")
    with pytest.raises(ValueError, match=f"does not have a Llama's layers: .*{re.escape(reason)}"):
        memory(getattr(transformers, f"{name}Config")(**SIZES), 12)


def test_keys_of_another_width_than_told_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.v_proj = torch.nn.Linear(64, 48)
    monkeypatch.setattr("diffllama.memory.meta_model", lambda config: model)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj\.weight has 48 rows instead of 32"):
        memory(model.config, 12)


def test_command_prints_what_is_needed(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    for src in (tmp_path, tmp_path / "config.json"):
        result = CliRunner().invoke(
            app, ["memory", str(src), "--context", "1000", "--batch", "2", "--dtype", "bfloat16"]
        )
        assert result.exit_code == 0
        estimate = memory(tiny_config(), 1000, 2, "bfloat16")
        for size in (estimate.weights, estimate.cache, estimate.activations, estimate.total):
            assert f"{size / 2**30:.3f}" in result.output
        assert f"{estimate.cache_per_token:,} bytes" in result.output
    assert CliRunner().invoke(app, ["memory", "3b", "--context", "32768", "--batch", "8"]).exit_code == 0


def test_configurations_are_read_from_folders_files_and_presets(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    assert read_config(tmp_path).to_dict() == read_config(tmp_path / "config.json").to_dict()
    assert isinstance(read_config("3b"), DiffLlamaConfig)
    assert read_config("3b").to_dict() == preset("3b").to_dict()


def test_presets_revision_is_refused() -> None:
    with pytest.raises(ValueError, match="3b is a preset, got 'main'"):
        read_config("3b", "main")


def test_code_of_a_folder_is_neither_run_nor_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("builtins.input", ask)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    fields = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    for model_type, message in {"unheard-of": "'unheard-of'. The model's own code is not run", "llama": None}.items():
        (tmp_path / "config.json").write_text(json.dumps(SIZES | fields | {"model_type": model_type}))
        if message is None:
            assert memory(read_config(tmp_path), 10).total > 0
        else:
            with pytest.raises(ValueError, match=message):
                read_config(tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**6}, "`num_hidden_layers` must be at most 1,000, got 1,000,000"),
        ({"num_labels": 10**9}, "`num_labels` must be at most"),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` must be at least 1, got 0"),
        ({"intermediate_size": 2**60}, "Cannot build a llama from this configuration: .*1152921504606846976"),
        ({"dtype": "load"}, "`dtype` must be a dtype of PyTorch, got 'load'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "`quantization_config`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_that_no_model_has_are_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama"} | fields))
    with pytest.raises(ValueError, match=message):
        memory(read_config(tmp_path), 10)


def test_memory_of_no_configuration_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_config(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    for content in ("", "{", "[" * 10**5, "[]", "{}", '{"model_type": "unheard-of"}', '{"model_type": []}'):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"config\.json"):
            read_config(file)
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'bert' does not have a Llama's layers"):
        memory(read_config(tmp_path), 10)
    for context, batch in ((0, 1), (1, 0), (2**63, 1), (1, 2**63)):
        with pytest.raises(ValueError, match=r"must be at least 1 and below 2\*\*63, got"):
            memory(tiny_config(), context, batch)
