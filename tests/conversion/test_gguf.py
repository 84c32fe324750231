"""GGUF files of Llama and related models, in the format of llama.cpp's converter."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from diffllama.checkpoints.errors import CheckpointError
from diffllama.conversion.engine import convert
from support.llama_checkpoints import CHAT_TEMPLATE, SIZES, save_model
from support.tiny_models import tokens


COMMON = SIZES | {"vocab_size": 288, "eos_token_id": 2, "rms_norm_eps": 3e-5, "rope_theta": 5e4}
TEXT = "hello, tell  the 北\n"


@dataclass(frozen=True)
class File:
    """A GGUF file: architecture, model, type of the matrices, kind of tokenizer, further metadata and tensors."""

    arch: str
    config_class: type[PreTrainedConfig]
    fields: dict[str, Any] = field(default_factory=dict)
    kind: str = "F32"
    tokenizer: str | None = "gpt2"
    metadata: dict[str, int | str] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()


READABLE = {
    "llama": File("llama", LlamaConfig),
    "llama in float16": File("llama", LlamaConfig, kind="F16"),
    "llama in q8_0": File("llama", LlamaConfig, kind="Q8_0"),
    "llama, tied, wider heads": File("llama", LlamaConfig, {"tie_word_embeddings": True, "head_dim": 24}),
    "llama, sentencepiece": File("llama", LlamaConfig, tokenizer="llama"),
    "mistral": File("llama", MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "qwen2": File("qwen2", Qwen2Config),
    "qwen3": File("qwen3", Qwen3Config, {"head_dim": 128, "tie_word_embeddings": True}),
    "phi3": File("phi3", Phi3Config, tokenizer="llama", metadata={"phi3.attention.sliding_window": 0}),
}
COMPLETED = {  # transformers reads neither sliding windows nor Qwen3's head width
    "phi3, window": File("phi3", Phi3Config, {"sliding_window": 8}, metadata={"phi3.attention.sliding_window": 8}),
    "qwen3, other heads": File("qwen3", Qwen3Config, {"head_dim": 24}),
}
LOST = {  # transformers would ignore these
    "biases": (File("llama", LlamaConfig, {"attention_bias": True}), r"(\s+tensor \S+\.bias){8}"),
    "llama 3.1": (File("llama", LlamaConfig, tensors=("rope_freqs.weight",)), r"\s+tensor rope_freqs\.weight"),
    "longrope": (File("phi3", Phi3Config, tensors=("rope_factors_long.weight",)), r"\s+tensor \w+_long\.weight"),
    "yarn": (File("qwen2", Qwen2Config, metadata={"qwen2.rope.scaling.type": "yarn"}), r"\s+qwen2\S+type 'yarn'"),
    "window": (File("llama", LlamaConfig, metadata={"llama.attention.sliding_window": 8}), r"\s+llama\S+window 8"),
    "rotation": (File("phi3", Phi3Config, metadata={"phi3.rope.dimension_count": 12}), r"\s+phi3\S+ 12 of 16"),
}


def write(folder: Path, file: File) -> Path:
    """Write a model into a folder, as `original` and as x.gguf."""
    config = file.config_class(**(COMMON | file.fields))
    width = getattr(config, "head_dim", None) or 16
    writer = GGUFWriter(folder / "x.gguf", file.arch)
    writer.add_name("Tiny")
    metadata = {"context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96}
    metadata |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": width}
    metadata |= {"vocab_size": 288, "rope.dimension_count": width}
    for key, value in ({f"{file.arch}.{key}": number for key, number in metadata.items()} | file.metadata).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.add_layer_norm_rms_eps(3e-5)
    writer.add_rope_freq_base(5e4)
    if file.tokenizer:
        add_tokenizer(writer, file.tokenizer)

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.arch)
    names = get_tensor_name_map(arch, 2)
    model = AutoModelForCausalLM.from_pretrained(save_model(folder / "original", config))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if file.arch == "llama" and re.search("[qk]_proj", name):  # halves of a head become neighbours
            heads = 4 if "q_proj" in name else 2
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = GGMLQuantizationType[file.kind if tensor.ndim == 2 else "F32"]
        name = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(name, quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    for name in file.tensors:
        writer.add_tensor(name, np.linspace(1, 8, 8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "x.gguf"


def add_tokenizer(writer: GGUFWriter, kind: str) -> None:
    """Add 288 tokens: bytes and a few pieces, spelled as in GPT-2 or in Llama 2."""
    special, pieces = ["<unk>", "<s>", "</s>"], ["he", "ll", "hell", "hello", "te"]
    letters = sorted(ByteLevel.alphabet()) if kind == "gpt2" else [*(f"<0x{i:02X}>" for i in range(256)), *"▁helot"]
    vocabulary = [*special, *letters, *pieces]
    vocabulary += [f"[{i}]" for i in range(288 - len(vocabulary))]
    writer.add_tokenizer_model(kind)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 3 + [1] * 285)
    writer.add_token_scores([-float(i) for i in range(288)])
    if kind == "gpt2":
        writer.add_token_merges(["h e", "l l", "he ll", "hell o", "t e"])
    for name, number in (("unknown", 0), ("bos", 1), ("eos", 2), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_chat_template(CHAT_TEMPLATE)


def logits(folder: Path, **location: str) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **location)(tokens(2, 20, vocab_size=288)).logits


@pytest.mark.parametrize("name", READABLE)
def test_logits_tokenizer_and_generation_config_are_those_transformers_reads(name: str, tmp_path: Path) -> None:
    gguf = write(tmp_path, READABLE[name])
    folder = convert(gguf, tmp_path / "new", source="llama")
    assert torch.equal(logits(folder), logits(tmp_path, gguf_file="x.gguf"))
    assert torch.equal(logits(folder), logits(tmp_path / "original")) is (READABLE[name].kind == "F32")

    old, new = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf"), AutoTokenizer.from_pretrained(folder)
    assert new.get_vocab() == old.get_vocab()
    assert new(TEXT).input_ids == old(TEXT).input_ids
    assert new.chat_template == CHAT_TEMPLATE
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)

    record = json.loads((folder / "conversion.json").read_text())
    assert record["verification"]["passed"] is True
    assert record["source"]["index_sha256"] == hashlib.sha256(gguf.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", COMPLETED)
def test_what_transformers_leaves_out_of_a_configuration_is_read(name: str, tmp_path: Path) -> None:
    folder = convert(write(tmp_path, COMPLETED[name]), tmp_path / "new", source="llama")
    assert torch.equal(logits(folder), logits(tmp_path / "original"))


@pytest.mark.parametrize("name", LOST)
def test_file_of_which_transformers_would_lose_a_part_is_refused(name: str, tmp_path: Path) -> None:
    file, lost = LOST[name]
    with pytest.raises(CheckpointError, match=rf"does not read these parts of .*x\.gguf; .* instead:{lost}$"):
        convert(write(tmp_path, file), tmp_path / "new", source="llama")
    assert not (tmp_path / "new").exists()


def test_transformers_reads_no_smollm3(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="architecture smollm3 is not supported yet"):
        convert(write(tmp_path, File("smollm3", SmolLM3Config)), tmp_path / "new", source="llama")


@pytest.mark.parametrize("kind", [None, "none"])
def test_without_a_tokenizer_in_the_file_there_is_none_in_the_folder(kind: str | None, tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": kind} if kind else {}
    gguf = write(tmp_path, File("llama", LlamaConfig, tokenizer=None, metadata=metadata))
    folder = convert(gguf, tmp_path / "new", source="llama")
    assert torch.equal(logits(folder), logits(tmp_path, gguf_file="x.gguf"))
    assert list(folder.glob("token*")) == []
