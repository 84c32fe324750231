"""Tiny Llama checkpoints, sound and broken, and what a folder holds."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM


CHAT_TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"


def llama(folder: Path, save: dict[str, Any] | None = None, **fields: Any) -> Path:
    """Saves a Llama with random weights, the same for the same fields: two layers, four heads, two key/value heads."""
    defaults = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(defaults | fields)))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder, **(save or {}))
    return folder


def add_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Saves a tokenizer beside a checkpoint."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def edit_config(folder: Path, **fields: Any) -> None:
    """Sets fields in a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes a folder's weights."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


def snapshot(folder: Path) -> dict[str, bytes | str | None]:
    """Everything in a folder, hidden files too: path -> content, target of a link, or `None` for a folder."""
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
        prepare: is given a folder in which `src` is a sound checkpoint, and returns what is to be converted.
        error: what `convert` raises.
        message: regular expression that the error's text matches.
        dest: where to, relative to the folder.
        even_to_overwrite: whether `overwrite=True` does not help.
    """

    prepare: Callable[[Path], Path]
    error: type[Exception]
    message: str
    dest: str = "dest"
    even_to_overwrite: bool = True


def _broken(break_it: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        break_it(folder / "src")
        return folder / "src"

    return prepare


def _file(name: str, content: bytes) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return prepare


def _cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def gguf_file(file: Path) -> Path:
    """A readable GGUF file of a Llama that lacks all tensors but the embedding."""
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(97)
    writer.add_tensor("token_embd.weight", np.zeros((97, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _cut_gguf(folder: Path) -> Path:
    _cut(gguf_file(folder / "cut.gguf"))
    return folder / "cut.gguf"


def _occupied(folder: Path) -> Path:
    (folder / "dest").mkdir(exist_ok=True)
    (folder / "dest" / "thesis.tex").write_text("years of work")
    return folder / "src"


def _source(folder: Path) -> Path:
    return folder / "src"


UP = "model.layers.1.mlp.up_proj.weight"
REFUSALS = {
    "missing folder": Refusal(lambda folder: folder / "nowhere", FileNotFoundError, "nowhere does not exist"),
    "no config.json": Refusal(
        _broken(lambda src: (src / "config.json").unlink()), FileNotFoundError, r"src has no config\.json"
    ),
    "no gguf suffix": Refusal(_file("model.bin", b"GGUF"), ValueError, r"model\.bin is neither a folder nor a \.gguf"),
    "config no json": Refusal(_broken(lambda src: (src / "config.json").write_text("{")), OSError, "not a valid JSON"),
    "config no object": Refusal(
        _broken(lambda src: (src / "config.json").write_text("[]")), Exception, "model_type|list"
    ),
    "other model": Refusal(
        _broken(lambda src: edit_config(src, model_type="mistral")), ValueError, "`model_type`.*'llama', got 'mistral'"
    ),
    "unknown model": Refusal(_broken(lambda src: edit_config(src, model_type="nonesuch")), ValueError, "nonesuch"),
    "code of its own": Refusal(
        _broken(lambda src: edit_config(src, model_type="mine", auto_map={"AutoConfig": "evil.Config"})),
        ValueError,
        "trust_remote_code",
    ),
    "quantized": Refusal(
        _broken(lambda src: edit_config(src, quantization_config={"quant_method": "bitsandbytes"})),
        ValueError,
        "quantized.*quantization_config",
    ),
    "partly rotated": Refusal(
        _broken(lambda src: edit_config(src, partial_rotary_factor=0.5)), Exception, r"partial_rotary_factor.*got 0\.5"
    ),
    "odd head_dim": Refusal(_broken(lambda src: edit_config(src, head_dim=15)), Exception, "`head_dim`.*got 15|even"),
    "no weights": Refusal(
        _broken(lambda src: (src / "model.safetensors").unlink()), OSError, r"no file named model\.safetensors"
    ),
    "cut safetensors": Refusal(
        _broken(lambda src: _cut(src / "model.safetensors")), SafetensorError, "incomplete metadata"
    ),
    "empty safetensors": Refusal(
        _broken(lambda src: (src / "model.safetensors").write_bytes(b"")), SafetensorError, "header too small"
    ),
    "missing tensor": Refusal(
        _broken(lambda src: edit_weights(src, lambda weights: weights.pop(UP))), ValueError, rf"missing_keys: {UP}"
    ),
    "extra tensor": Refusal(
        _broken(lambda src: edit_weights(src, lambda weights: weights.update(more=torch.zeros(2)))),
        ValueError,
        "unexpected_keys: more",
    ),
    "misshapen tensor": Refusal(
        _broken(lambda src: edit_weights(src, lambda weights: weights.update({UP: torch.zeros(2)}))),
        RuntimeError,
        "mismatched",
    ),
    "too many layers": Refusal(
        _broken(lambda src: edit_config(src, num_hidden_layers=3)), ValueError, r"missing_keys: model\.layers\.2.*…"
    ),
    "too few layers": Refusal(
        _broken(lambda src: edit_config(src, num_hidden_layers=1)), ValueError, r"unexpected_keys: model\.layers\.1.*…"
    ),
    "broken tokenizer": Refusal(
        _broken(lambda src: (src / "tokenizer.json").write_text("{")), ValueError, "double quotes"
    ),
    "garbage gguf": Refusal(_file("x.gguf", b"garbage" * 99), ValueError, "GGUF magic"),
    "empty gguf": Refusal(_file("x.gguf", b""), ValueError, "empty file"),
    "cut gguf header": Refusal(_file("x.gguf", b"GGUF\3\0\0\0\1\0\0\0\0\0\0\0"), Exception, "buffer|unpack"),
    "cut gguf tensor": Refusal(_cut_gguf, ValueError, "cannot reshape"),
    "gguf without tensors": Refusal(
        lambda folder: gguf_file(folder / "x.gguf"), ValueError, r"x\.gguf and its configuration do not match: missing"
    ),
    "occupied dest": Refusal(
        _occupied, FileExistsError, r"dest exists and is not empty\. .*--overwrite", even_to_overwrite=False
    ),
    "file as dest": Refusal(_source, FileExistsError, "readme is not a folder", dest="readme"),
    "dest in src": Refusal(_source, FileExistsError, "overlap", dest="src/new"),
    "dest is src": Refusal(_source, FileExistsError, "overlap", dest="src"),
    "dest is src, otherwise spelled": Refusal(_source, FileExistsError, "overlap", dest="readme/../src"),
    "src in dest": Refusal(_source, FileExistsError, "overlap", dest="."),
    "dest is the gguf file": Refusal(
        lambda folder: gguf_file(folder / "x.gguf"), FileExistsError, "overlap", dest="x.gguf"
    ),
}


def prepared(refusal: Refusal, folder: Path) -> tuple[Path, Path]:
    """Makes the folder of a refusal. Returns what is to be converted, and where to."""
    llama(folder / "src")
    (folder / "readme").write_text("a file")
    return refusal.prepare(folder), folder / refusal.dest
