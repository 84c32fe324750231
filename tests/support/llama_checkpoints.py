"""Tiny checkpoints of Llama and related models, valid and broken, and snapshots of folders."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from diffllama.checkpoints.errors import CheckpointError
from diffllama.conversion.weight_map import WeightMap, plan
from support.tiny_models import tiny_tokenizer


CHAT_TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"


SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "pad_token_id": 0,
    "eos_token_id": None,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i / 4 for i in range(8)], "original_max_position_embeddings": 16,
}  # fmt: skip
RELATIVES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "mistral-window": (MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-window": (
        Qwen3Config,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3-biases": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "phi3-window": (Phi3Config, {"sliding_window": 8}),
    "phi3-longrope": (Phi3Config, {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
}
"""Name -> configuration class of a model related to Llama, and fields that it adds to `SIZES`."""


SAVED = tempfile.TemporaryDirectory()


def save_model(folder: Path, config: PreTrainedConfig, std: float = 0.2, **save: Any) -> Path:
    """Save a language model with random weights from a fixed seed, built once per configuration."""
    key = repr((type(config), config.to_json_string(use_diff=False), std, save))
    saved = Path(SAVED.name, hashlib.sha256(key.encode()).hexdigest())
    if not saved.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=std)
        model.save_pretrained(saved, **save)
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    return folder


def llama(folder: Path, save: dict[str, Any] | None = None, **fields: Any) -> Path:
    """Save a Llama with random weights: two layers, four heads, two key/value heads."""
    return save_model(folder, LlamaConfig(**(SIZES | fields)), **(save or {}))


def add_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Save a tokenizer beside a checkpoint."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields in a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change a folder's weights."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


def verification(folder: Path) -> dict[str, Any]:
    """Return the verification record of a converted folder."""
    return json.loads((folder / "conversion.json").read_text())["verification"]


def apply(weights: dict[str, torch.Tensor], weight_map: WeightMap, *options: Any) -> dict[str, torch.Tensor]:
    """Apply a weight map to weights. `options` are those of `plan`: our configuration, and a dtype."""
    steps = plan({name: tensor.to("meta") for name, tensor in weights.items()}, weight_map, *options)
    return {name: step.make(*(weights[needed] for needed in step.inputs)) for name, step in steps.items()}


def snapshot(folder: Path) -> dict[str, bytes | str | None]:
    """Return everything in a folder: path -> content of a file, target of a link, or `None` for a folder."""
    return {
        str(path.relative_to(folder)): (
            str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        for path in folder.rglob("*")
    }


@dataclass(frozen=True)
class Refusal:
    """A conversion that must be refused.

    Attributes:
        prepare: prepares a folder that contains a valid checkpoint `src`, and returns the path to convert.
        error: exception that `convert` raises.
        message: regular expression that matches the exception's message.
        dest: destination, relative to the folder.
        even_to_overwrite: whether `convert` also refuses with `overwrite=True`.
    """

    prepare: Callable[[Path], Path]
    error: type[Exception]
    message: str
    dest: str = "dest"
    even_to_overwrite: bool = True


def _broken(error: type[Exception], message: str, break_it: Callable[[Path], Any]) -> Refusal:
    """Refusal of a checkpoint that a function breaks."""

    def prepare(folder: Path) -> Path:
        break_it(folder / "src")
        return folder / "src"

    return Refusal(prepare, error, message)


def _config(message: str, error: type[Exception] = ValueError, **fields: Any) -> Refusal:
    """Refusal of fields in config.json."""
    return _broken(error, message, lambda src: edit_config(src, **fields))


def _text(name: str, content: str, message: str) -> Refusal:
    """Refusal of a content of a file of the checkpoint."""
    return _broken(ValueError, message, lambda src: (src / name).write_text(content))


def _tensors(message: str, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Refusal:
    """Refusal of weights."""
    return _broken(CheckpointError, message, lambda src: edit_weights(src, edit))


def _file(name: str, content: bytes, message: str, error: type[Exception] = ValueError) -> Refusal:
    """Refusal of a file with this content instead of a checkpoint."""
    return _path(name, lambda file: file.write_bytes(content), error, message)


def _cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def _other_weights(src: Path) -> None:
    """Name a second file of weights in config.json, which transformers would load instead of model.safetensors."""
    weights = load_file(src / "model.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, src / "other.safetensors", metadata={"format": "pt"})
    edit_config(src, transformers_weights="other.safetensors")


def gguf_file(file: Path, layers: int = 1) -> Path:
    """Write a readable GGUF file of a Llama that lacks all tensors but the embedding."""
    writer = GGUFWriter(file, "llama")
    sizes = {"context_length": 256, "embedding_length": 64, "block_count": layers, "feed_forward_length": 96}
    for key, value in (sizes | {"attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 97}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((97, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
BROKEN_GGUF = r"/x\.gguf is not a complete GGUF file: {}\. Download it again\.$"
SIZES_IN_FILE = r"`num_hidden_layers` in .*{} must be a whole number from 1 to 10,000, got 1000000"
LAYER = r"(\s+{}: model\.layers\.{}\.\S+ \[\d+(, 64|, 96)?\]){{9}}$"


def _path(name: str, make: Callable[[Path], Any], error: type[Exception], message: str, dest: str = "dest") -> Refusal:
    """Refusal of a path, beside the checkpoint or the checkpoint itself, that a function creates."""

    def prepare(folder: Path) -> Path:
        make(folder / name)
        return folder / name

    return Refusal(prepare, error, message, dest)


def _nothing(path: Path) -> None:
    pass


def _occupied(folder: Path) -> Path:
    (folder / "dest").mkdir(exist_ok=True)
    (folder / "dest" / "config.json").write_text("an older model")
    (folder / "dest" / "thesis.tex").write_text("years of work")
    return folder / "src"


REFUSALS = {
    "missing folder": _path("nowhere", _nothing, FileNotFoundError, "nowhere does not exist"),
    "no config.json": _broken(
        FileNotFoundError, r"src has no config\.json", lambda src: (src / "config.json").unlink()
    ),
    "config no json": _text("config.json", "{", r"src/config\.json is not valid JSON"),
    "config no object": _text("config.json", "[]", r"src/config\.json must be .*got list"),
    "config too deep": _text("config.json", "[" * 100_000, r"config\.json .*too deeply"),
    "generation settings no json": _text("generation_config.json", "{", r"generation_config\.json is not valid JSON"),
    "broken tokenizer": _text("tokenizer.json", "{", "double quotes"),
    "adapter": _text("adapter_config.json", "{}", r"an adapter beside its model \(adapter_config\.json\).*merge_and_"),
    "adapter behind a link to nothing": _broken(
        ValueError, "an adapter beside", lambda src: (src / "adapter_config.json").symlink_to("nowhere")
    ),
    "a million layers": _config(SIZES_IN_FILE.format(r"src/config\.json"), num_hidden_layers=10**6),
    "more layers than tensors": _config("is 4,000, .* only 21", CheckpointError, num_hidden_layers=4000),
    "too many layers": _config(LAYER.format("missing", 2), CheckpointError, num_hidden_layers=3),
    "too few layers": _config(LAYER.format("extra", 1), CheckpointError, num_hidden_layers=1),
    "labels without number": _config("`num_labels` in .* got 1000000000", num_labels=10**9),
    "a size of exabytes": _config("`hidden_size` in .* got 4611686018427387904", hidden_size=2**62),
    "a negative size": _config("`vocab_size` in .* got -1", vocab_size=-1),
    "a size that is no number": _config("`head_dim` in .* got '16'", head_dim="16"),
    "layer types that are no list": _config(r"src/config\.json is not a valid configuration: TypeError", layer_types=7),
    "other model": _config("`model_type`.*'llama'.*, got 'gemma'", model_type="gemma"),
    "unknown model": _config("nonesuch", model_type="nonesuch"),
    "code of its own": _config("trust_remote_code", model_type="mine", auto_map={"AutoConfig": "evil.Config"}),
    "quantized": _config("quantized.*quantization_config", quantization_config={"quant_method": "bitsandbytes"}),
    "partly rotated": _config(r"partial_rotary_factor.*got 0\.5", Exception, partial_rotary_factor=0.5),
    "odd head_dim": _config("`head_dim`.*got 15|even", Exception, head_dim=15),
    "other weights named": _broken(
        ValueError, r"`transformers_weights` in .*src/config\.json .* got 'other\.safetensors'", _other_weights
    ),
    "cut safetensors": _broken(
        CheckpointError, r"model\.safetensors: .*incomplete metadata", lambda src: _cut(src / "model.safetensors")
    ),
    "several faults": _tensors(
        rf"missing: {Q} \[64, 64\]\s+extra: x \[64, 64\]\s+misshapen: {UP} \[2\], must be \[96, 64\]$",
        lambda weights: weights.update({UP: torch.zeros(2), "x": weights.pop(Q)}),
    ),
    "adapter beside a gguf file": _path(
        "x.gguf", lambda file: gguf_file(file).with_name("adapter_config.json").touch(), ValueError, "has an adapter"
    ),
    "a gguf file of a million layers": _path(
        "x.gguf", lambda file: gguf_file(file, 10**6), ValueError, SIZES_IN_FILE.format(r"x\.gguf")
    ),
    "a gguf file with more layers than tensors": _path(
        "x.gguf", lambda file: gguf_file(file, 4000), CheckpointError, r"is 4,000, .* only 1\."
    ),
    "gguf without tensors": _path(
        "x.gguf", gguf_file, CheckpointError, r"x\.gguf and its configuration do not match:(\s+missing_keys: \S+){10}$"
    ),
    "no gguf suffix": _file("model.bin", b"GGUF", r"model\.bin is neither a folder nor a \.gguf"),
    "garbage gguf": _file("x.gguf", b"garbage" * 99, BROKEN_GGUF.format("GGUF magic invalid")),
    "empty gguf": _file("x.gguf", b"", BROKEN_GGUF.format(".*empty file")),
    "cut gguf header": _file("x.gguf", b"GGUF\3\0\0\0\1\0\0\0\0\0\0\0", BROKEN_GGUF.format(".+")),
    "cut gguf tensor": _path(
        "x.gguf", lambda file: _cut(gguf_file(file)), ValueError, BROKEN_GGUF.format("cannot reshape .*")
    ),
    "a pipe": _path("pipe.gguf", os.mkfifo, ValueError, r"pipe\.gguf is neither a folder nor a \.gguf file"),
    "a loop of links": _path(
        "loop", lambda link: link.symlink_to("loop"), FileNotFoundError, "loop is a link to loop, which does not exist"
    ),
    "occupied dest": Refusal(
        _occupied, FileExistsError, r"dest exists and is not empty\. .*--overwrite", even_to_overwrite=False
    ),
    "file as dest": _path("src", _nothing, FileExistsError, "readme is not a folder", dest="readme"),
    "dest in src": _path("src", _nothing, FileExistsError, "overlap", dest="src/new"),
    "dest is src, otherwise spelled": _path("src", _nothing, FileExistsError, "overlap", dest="readme/../src"),
    "src in dest": _path("src", _nothing, FileExistsError, "overlap", dest="."),
    "dest is the gguf file": _path("x.gguf", gguf_file, FileExistsError, "overlap", dest="x.gguf"),
}


def prepared(refusal: Refusal, folder: Path) -> tuple[Path, Path]:
    """Prepare the folder of a refusal. Returns the source and the destination of the conversion."""
    llama(folder / "src")
    (folder / "readme").write_text("a file")
    return refusal.prepare(folder), folder / refusal.dest
