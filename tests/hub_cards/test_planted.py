"""Model folders in which something is planted: `check` finds all of it, and nothing in sound folders."""

import io
import json
import os
import pickle
import shutil
import signal
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffllama.hub_cards import check, export, limits
from diffllama.hub_cards.findings import Finding, errors
from diffllama.hub_cards.inspection import inspect
from diffllama.hub_cards.limits import inspect_with_limits
from support.tiny_models import tiny_model, tiny_tokenizer


HF = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA12"
HEX = "0f1e2d3c4b5a69788796a5b4c3d2e1f001234567"
RANDOM = "q7Xw2Lp9Rk4Vb8Nz3Mt6"


class Call:
    """Is pickled as a call."""

    def __reduce__(self) -> Any:
        return os.system, ("echo x",)


def archive(pack: Callable[[io.BytesIO], Any]) -> bytes:
    """The bytes of an archive with a file in it."""
    buffer = io.BytesIO()
    with pack(buffer) as opened:
        add = opened.writestr if isinstance(opened, zipfile.ZipFile) else None
        if add:
            add("x.txt", "x")
        else:
            entry = tarfile.TarInfo("x.txt")
            opened.addfile(entry, io.BytesIO())
    return buffer.getvalue()


def torch_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.save({"x": torch.zeros(1)}, buffer)
    return buffer.getvalue()


def safetensors_bytes(**metadata: str) -> bytes:
    header = json.dumps(
        {"__metadata__": metadata, "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


def notebook(text: str) -> bytes:
    escaped = "".join(f"\\u{ord(c):04x}" for c in text)
    return f'{{"cells": [{{"cell_type": "code", "source": ["{escaped}"]}}], "nbformat": 4}}'.encode()


ZIP = archive(lambda buffer: zipfile.ZipFile(buffer, "w"))
TAR = archive(lambda buffer: tarfile.TarFile(fileobj=buffer, mode="w"))
ELF = b"\x7fELF\x02\x01\x01" + bytes(57)
PICKLE = pickle.dumps(Call())
CUT = b"cos\nsystem\n(S'echo x'\ntR\xff"
"""Runs the command before it fails."""

FILES: dict[str, tuple[str, bytes, str]] = {
    # pickles
    "pickle by suffix": ("training_args.bin", b"anything", "pickle"),
    "pickle": ("harmless.model", PICKLE, "pickle"),
    "pickle of protocol 0": ("old.dat", b"cos\nsystem\n(S'echo'\ntR.", "pickle"),
    "pickle cut off after REDUCE": ("cut.dat", CUT, "pickle"),
    "pickle without STOP": ("no_stop.dat", PICKLE[:-1], "pickle"),
    "pickle behind a pickle": ("two.dat", pickle.dumps(1) + PICKLE, "pickle"),
    "pickle behind a prefix": ("prefix.dat", b"XXXX" + PICKLE, "unknown-file"),
    "pickle behind zeros": ("zeros.dat", bytes(512) + PICKLE, "unknown-file"),
    "pickle as licence": ("LICENSE.dat", CUT, "pickle"),
    "pickle as vocabulary": ("tokenizer.model", PICKLE, "pickle"),
    "pickle as picture": ("pickle.png", PICKLE, "pickle"),
    "pickle of torch": ("notes", torch_bytes(), "archive"),
    "pickle of numpy": ("array.npy", b"\x93NUMPY", "pickle"),
    "pickle of INST": ("inst.dat", b"(S'echo x'\nios\nsystem\n.", "pickle"),
    "weights of torch": ("pytorch_model.bin", torch_bytes(), "pickle"),
    "optimizer": ("checkpoint-5/optimizer.pt", torch_bytes(), "pickle"),
    "random states": ("rng_state.pth", b"", "pickle"),
    "weights of keras": ("tf_model.h5", b"\x89HDF\r\n\x1a\n", "pickle"),
    # archives
    "tar": ("data.tar", TAR, "archive"),
    "tar under another name": ("data.txt", TAR, "archive"),
    "zip": ("data.zip", ZIP, "archive"),
    "zip behind a picture": ("picture.png", png() + ZIP, "archive"),
    "zip under another name": ("NOTICE.zip", ZIP, "archive"),
    "gzip": ("x.gz", b"\x1f\x8b\x08" + bytes(9), "archive"),
    "bzip2": ("x.bz2", b"BZh91AY", "archive"),
    "xz": ("x.xz", b"\xfd7zXZ\0", "archive"),
    "7z": ("x.7z", b"7z\xbc\xaf\x27\x1c", "archive"),
    "zstd": ("x.zst", b"\x28\xb5\x2f\xfd" + bytes(9), "archive"),
    "rar": ("x.rar", b"Rar!\x1a\x07", "archive"),
    # programs
    "library": ("kernel.so", ELF, "program"),
    "library by suffix alone": ("empty.so", b"", "unknown-file"),
    "ELF under another name": ("weights.data", ELF, "program"),
    "ELF as text": ("USE_POLICY.md", ELF, "program"),
    "program of Windows": ("setup.txt", b"MZ\x90\0", "program"),
    "program of macOS": ("setup", b"\xcf\xfa\xed\xfe", "program"),
    "script": ("install.sh", b"#!/bin/sh\necho x\n", "program"),
    "script under another name": ("run.txt", b"#!/usr/bin/env python\n", "program"),
    "script without a line": ("setup.bat", b"echo x\r\n", "unknown-file"),
    "bytecode": ("__pycache__/x.cpython-311.pyc", b"\xa7\r\r\n", "unknown-file"),
    "WebAssembly": ("x.wasm", b"\0asm\1\0\0\0", "program"),
    "make file": ("Makefile", b"all:\n\techo x\n", "unknown-file"),
    "requirements": ("requirements.txt", b"evil\n", "unknown-file"),
    # other models
    "adapter": ("adapter_config.json", b'{"base_model_name_or_path": "evil/model"}', "adapter"),
    "weights of an adapter": ("adapter_model.safetensors", safetensors_bytes(), "adapter"),
    "adapter in a folder": ("lora/adapter_config.json", b"{}", "adapter"),
    "weights of another model": ("other.safetensors", safetensors_bytes(), "unknown-file"),
    "a variant's weights": ("model.fp16.safetensors", safetensors_bytes(), "unknown-file"),
    "ONNX": ("model.onnx", b"\x08\x07\x12\x07pytorch", "unknown-file"),
    "GGUF": ("model.gguf", b"GGUF\3\0\0\0" + bytes(64), "unknown-file"),
    "TorchScript": ("model.ptl", ZIP, "archive"),
    "msgpack": ("flax_model.msgpack", b"\x81\xa1x\x01", "unknown-file"),
    "processor": ("preprocessor_config.json", b'{"auto_map": {"AutoProcessor": "x.Y"}}', "auto-map"),
    # code
    "generation's code": ("custom_generate/generate.py", b"import os\n", "other-code"),
    "a server's code": ("handler.py", b"import os\n", "other-code"),
    "code of a pipeline": ("pipeline.py", b"import os\n", "other-code"),
    "code in a folder": ("a/b/c.py", b"import os\n", "other-code"),
    "code that hides": ("zero.py", b"x = 1\0\n", "content"),
    # secrets
    "secret in text": ("notes.txt", f"token {HF}".encode(), "secret"),
    "secret in UTF-16": ("utf16.txt", f"token {HF}".encode("utf-16"), "secret"),
    "secret in UTF-16 without a mark": ("utf16be.txt", f"token {HF}".encode("utf-16-be"), "secret"),
    "secret in UTF-32": ("utf32.txt", f"token {HF}".encode("utf-32"), "secret"),
    "secret in a notebook": ("train.ipynb", notebook(f"token = '{HF}'"), "secret"),
    "secret in a file's name": (f"log-{HF}.txt", b"", "secret"),
    "secret in a folder's name": (f"{HF}/x.txt", b"", "secret"),
    "secret in safetensors": ("secret.safetensors", safetensors_bytes(note=HF), "secret"),
    "secret as a field": ("field.json", json.dumps({HF: 1}).encode(), "secret"),
    "secret in escapes": ("escaped.json", json.dumps({"x": HF}).replace("f", "\\u0066").encode(), "secret"),
    "named secret": ("named.json", b'{"hub_token": "abc"}', "secret"),
    "secret of GitLab": ("gitlab.txt", f"glpat-{RANDOM}".encode(), "secret"),
    "secret of GitHub": ("github.txt", f"ghp_{RANDOM}{RANDOM[:16]}".encode(), "secret"),
    "secret of W&B": ("wandb.env", f"WANDB_API_KEY={HEX}".encode(), "secret"),
    "secret of W&B in YAML": ("wandb.yaml", f"wandb:\n  api_key: {HEX}\n".encode(), "secret"),
    "secret of OpenAI": ("openai.env", f"OPENAI=sk-proj-{RANDOM}{RANDOM}".encode(), "secret"),
    "secret of AWS": ("aws.env", b"AKIAQ7XW2LP9RK4VB8NZ", "secret"),
    "secret of Slack": ("slack.txt", f"xoxb-12345678901-{RANDOM.lower()}".encode(), "secret"),
    "secret of PyPI": ("pypirc", f"pypi-AgEIcHlwaS5vcmc{RANDOM * 4}".encode(), "secret"),
    "secret in a URL": ("url.txt", b"git clone https://me:Tr0ub4dor3@example.org/x", "secret"),
    "secret in YAML": ("settings.yaml", f"db:\n  password: {RANDOM}\n".encode(), "secret"),
    "secret in a netrc": ("netrc.txt", f"password={RANDOM}\n".encode(), "secret"),
    "JSON web token": ("jwt.txt", b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.x", "secret"),
    "private key": ("id_rsa", b"-----BEGIN OPENSSH PRIVATE KEY-----", "secret"),
    "private key with a password": ("key.pem", b"-----BEGIN ENCRYPTED PRIVATE KEY-----", "secret"),
    # paths
    "path in text": ("paths.txt", b"saved to /home/me/models/x", "path"),
    "path in a notebook": ("path.ipynb", notebook("open('/Users/me/x.txt')"), "path"),
    "path in code": ("where.py", b"PATH = '/scratch/me/x'\n", "path"),
    "path of Windows": ("windows.txt", b"C:\\Users\\me\\x", "path"),
    "path in JSON": ("path.json", b'{"a": {"path": "/data/llama/weights"}}', "path"),
    "path in a command": ("command.json", b'{"cmd": "train --out /home/me/out"}', "path"),
    # broken
    "cut JSON": ("special_tokens_map.json", b'{"cut off', "json"),
    "NaN in JSON": ("added_tokens.json", b'{"x": NaN}', "json"),
    "deep JSON": ("tekken.json", b"[" * 100_000, "json"),
    "UTF-16 as text": ("CITATION.cff", "title: x".encode("utf-16"), "content"),
    "no picture": ("figure.png", b"hello", "content"),
    "more than a picture": ("more.png", png() + b"hello", "content"),
    "no tokenizer": ("spiece.model", b"\x0a\xff\xff\xff\xff\x0f\x00", "content"),
    "cut weights": ("cut.safetensors", safetensors_bytes()[:-1], "weights"),
}  # fmt: skip
"""What is planted -> file, content, and a rule that finds it. All of them are planted into one folder."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    tiny_model("v2").save_pretrained(folder / "src")
    tiny_tokenizer().save_pretrained(folder / "src")
    exported = export(folder / "src", folder / "dest", metadata={"license": "mit"}, max_shard_size="100KB")
    list(inspect(exported))  # imports what the processes of `check` would otherwise import each
    return exported


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """The sound folder, in which to plant: its files are links, so they must be replaced and not written into."""
    return shutil.copytree(sound, tmp_path / "folder", copy_function=os.link)


def plant(folder: Path, name: str, content: bytes | str) -> None:
    """Writes a file in the place of what is there."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def edit(folder: Path, name: str, **fields: Any) -> None:
    """Sets fields in a JSON file."""
    plant(folder, name, json.dumps(json.loads((folder / name).read_text()) | fields))


class TestFiles:
    @pytest.fixture(scope="class")
    def found(self, sound: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
        folder = shutil.copytree(sound, tmp_path_factory.mktemp("planted") / "folder", copy_function=os.link)
        for name, content, _ in FILES.values():
            plant(folder, name, content)
        return check(folder)

    @pytest.mark.parametrize("what", FILES)
    def test_it_is_found(self, what: str, found: list[Finding]) -> None:
        name, _, rule = FILES[what]
        about = [finding for finding in found if finding.file == name and finding.severity == "error"]
        assert rule in {finding.rule for finding in about}, about

    def test_nothing_else_is(self, sound: Path, found: list[Finding]) -> None:
        planted = {name for name, _, _ in FILES.values()}
        assert {finding.file for finding in found} == planted

    def test_no_secret_is_shown(self, found: list[Finding]) -> None:
        for finding in found:
            for secret in (HF, HEX, RANDOM):
                assert secret[8:] not in finding.message

    def test_none_is_found_twice(self, found: list[Finding]) -> None:
        assert len(found) == len(set(found))


def huge(folder: Path) -> None:
    with (folder / "huge.dat").open("wb") as file:
        file.truncate(1 << 40)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")


def loop(folder: Path) -> None:
    (folder / "a.txt").symlink_to(folder / "b.txt")
    (folder / "b.txt").symlink_to(folder / "a.txt")


def link_out(folder: Path) -> None:
    (folder / "NOTICE").symlink_to("/etc/hostname")


def loop_of_folders(folder: Path) -> None:
    (folder / "again").symlink_to(folder)


def weights(folder: Path, value: float) -> None:
    shard = max(folder.glob("model-*.safetensors"), key=lambda path: path.stat().st_size)
    tensors = load_file(shard)
    shard.unlink()
    max(tensors.values(), key=torch.numel).view(-1)[-1] = value
    save_file(tensors, shard, {"format": "pt"})


def more_code(folder: Path) -> None:
    name = "modeling_diffllama.py"
    plant(folder, name, (folder / name).read_text() + "\nimport os\nos.system('echo x')\n")


def twice(folder: Path) -> None:
    plant(folder, "config.json", (folder / "config.json").read_text().replace("{", '{"model_type": "llama",', 1))


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: plant(folder, "chat_template.jinja", text)


def named_template(folder: Path) -> None:
    plant(folder, "additional_chat_templates/tools.jinja", "{{ messages['__class__'] }}")


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, "config.json", **fields)


def settings(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, "tokenizer_config.json", **fields)


def card(text: str) -> Callable[[Path], None]:
    return lambda folder: plant(
        folder, "README.md", (folder / "README.md").read_text().replace("---\n", f"---\n{text}\n", 1)
    )


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HARD = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3

FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard too many": (
        lambda folder: plant(folder, "model-00009-of-00009.safetensors", safetensors_bytes()),
        "model-00009-of-00009.safetensors:unknown-file",
    ),
    "huge file": (huge, "huge.dat:unknown-file"),
    "pipe": (pipe, "pipe.safetensors:special-file"),
    "loop of links": (loop, "a.txt:link"),
    "link out of the folder": (link_out, "NOTICE:link"),
    "link to a folder": (loop_of_folders, "again:link"),
    "NaN": (lambda folder: weights(folder, float("nan")), ":non-finite"),
    "infinity": (lambda folder: weights(folder, float("-inf")), ":non-finite"),
    "os.system in the model's code": (more_code, "modeling_diffllama.py:code-differs"),
    "code that is nested too deeply": (
        lambda folder: plant(folder, "differential_attention.py", "x = " + "(" * 50_000),
        "differential_attention.py:code",
    ),
    "a field twice": (twice, "config.json:json"),
    "other weights": (config(transformers_weights="other.safetensors"), "config.json:config-field"),
    "kernels": (config(kernel_config={"x": "evil/kernel"}), "config.json:config-field"),
    "attention of a kernel": (config(_attn_implementation_internal="evil/kernel"), "config.json:config-field"),
    "experts of a kernel": (config(_experts_implementation="evil/kernel"), "config.json:config-field"),
    "pipelines": (config(custom_pipelines={"x": {"impl": "evil.P"}}), "config.json:config-field"),
    "not causal": (config(is_causal=False), "config.json:config-field"),
    "code of another repository": (config(auto_map={"AutoModel": "evil/x--m.M"}), "config.json:auto-map"),
    "path in the configuration": (config(_name_or_path="/lfs/me/model"), "config.json:path"),
    "a tokenizer's code": (settings(auto_map={"AutoTokenizer": ["x.Y", None]}), "tokenizer_config.json:auto-map"),
    "template in the tokenizer's settings": (
        settings(chat_template="{{ messages.__class__ }}"),
        "tokenizer_config.json:template",
    ),
    "template that reaches for __init__": (
        template("{{ messages.__init__.__globals__ }}"),
        "chat_template.jinja:template",
    ),
    "template that may reach for __init__": (
        template("{% if tools %}{{ messages.__init__ }}{% endif %}x"),
        "chat_template.jinja:template",
    ),
    "template with a filter": (template("{{ messages | attr('__init__') }}"), "chat_template.jinja:template"),
    "template that hides what it reaches for": (
        template("{{ messages['__in' ~ 'it__'].x }}"),
        "chat_template.jinja:template",
    ),
    "template of another name": (named_template, "additional_chat_templates/tools.jinja:template"),
    "template that is none": (template("{% if %}"), "chat_template.jinja:template"),
    "secret in a template": (template(f"{{# {HF} #}}"), "chat_template.jinja:secret"),
    "secret in a card": (card(f"note: {HF}"), "README.md:secret"),
    "path in a card": (card("base_model: /tmp/me/model"), "README.md:path"),
    "metadata that are none": (card("license: [\n"), "README.md:card"),
    "aliases in a card": (card(BOMB), "README.md:card"),
    "missing code": (lambda folder: (folder / "diff_fused.py").unlink(), "diff_fused.py:code"),
    "no weights": (lambda folder: [file.unlink() for file in folder.glob("model*")], "model.safetensors:weights"),
}  # fmt: skip
"""What is planted -> how, and FILE:RULE that finds it. Each needs a folder of its own."""


@pytest.mark.parametrize("what", FOLDERS)
def test_what_is_planted_into_a_folder_is_found(what: str, folder: Path) -> None:
    spoil, expected = FOLDERS[what]
    spoil(folder)
    found = [finding for finding in inspect(folder) if isinstance(finding, Finding)]
    assert any(expected in line for line in errors(found)), found
    assert len(found) == len(set(found))


BROKEN = ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", [*BROKEN, "model-00001-of-00004.safetensors"])
def test_a_file_that_is_cut_off_is_found_once(name: str, folder: Path) -> None:
    plant(folder, name, (folder / name).read_bytes()[:-5])
    (found,) = dict.fromkeys(finding for finding in inspect(folder) if isinstance(finding, Finding))
    assert found.file == name
    assert found.rule == ("weights" if name.endswith(".safetensors") else "json")


class TestLimits:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (HARD, "takes longer than 2 s"),
            ("{{ 'x' * 1500000000 }}", "takes too much memory"),
            ("{{ 'x' * 99999999999 }}", "takes too much memory"),
        ],
        ids=["time", "memory", "more memory than there is"],
    )
    def test_a_template_that_takes_too_much_is_found(
        self, text: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "SECONDS", 2 if text == HARD else 60)
        monkeypatch.setattr(limits, "MEMORY", 2**30)
        plant(folder, "chat_template.jinja", text)
        (found,) = check(folder)
        assert str(found).startswith(f"chat_template.jinja:limits: {message}")

    def test_a_process_that_dies_is_found(self, tmp_path: Path) -> None:
        def crash(folder: Path) -> Iterator[Finding | str]:
            yield "bad.model"
            os.kill(os.getpid(), signal.SIGKILL)

        (found,) = inspect_with_limits(crash, tmp_path)
        assert str(found).startswith("bad.model:limits: ends the process that reads it (exit code -9)")


def sentencepiece() -> bytes:
    """A model with one piece and a specification, as SentencePiece writes them."""
    return b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02" + b"\x12\x02\x18\x01"


SOUND: dict[str, dict[str, bytes | str]] = {
    "SentencePiece": {"tokenizer.model": sentencepiece(), "spiece.model": sentencepiece()},
    "vocabulary and merges": {
        "vocab.json": '{"a": 0, "/home/me": 1, "sk-learn-contrib-lightning-estimators": 2}',
        "merges.txt": "#version: 0.2\nc at\n/home /me\n",
        "vocab.txt": "config\nfoo\n/tmp/x\n",
        "x.tiktoken": "IQ== 0\nIg== 1\n",
        "special_tokens_map.json": '{"bos_token": "<s>"}',
        "added_tokens.json": '{"w96": 96}',
    },
    "several templates": {
        "chat_template.jinja": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        "additional_chat_templates/tool_use.jinja": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    },
    "pictures": {"losses.png": png(), "figures/maps.png": png(), "a.gif": b"GIF89a\1\0\1\0\0\0\0;"},
    "licences": {"LICENSE-CODE": "(c) 2026\nus\n", "NOTICE.txt": "copyright\nholders\n", "USE_POLICY.md": "Be good."},
    "files of git": {".gitattributes": "*.safetensors filter=lfs\n", ".cache/huggingface/x.lock": ""},
    "texts that look like secrets and paths": {
        "README.md": "---\nlicense: mit\n---\nsk-learn-contrib-lightning-estimators, POST /v1/chat/completions, "
        "hf_xxxxxxxxxxxxxxxxxxxx https://user:password@example.org OPENAI_API_KEY=your-key-here api_key='none' "
        f"password: secret commit {HEX} sha256 {HEX}{HEX[:24]}\n",
        "training.json": '{"endpoint": "/v1/chat/completions", "arguments": {"optim": "adamw_torch"}}',
    },
    "results": {"evaluation.json": '{"results": []}', "conversion.json": '{"tool": "diffllama"}'},
}  # fmt: skip


@pytest.mark.parametrize("kind", SOUND)
def test_nothing_is_wrong_with_sound_folders(kind: str, folder: Path) -> None:
    for name, content in SOUND[kind].items():
        plant(folder, name, content)
    assert [str(finding) for finding in inspect(folder) if isinstance(finding, Finding)] == []


def test_a_quantized_model_is_noted(folder: Path) -> None:
    edit(folder, "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    shard = min(folder.glob("model-*.safetensors"))
    tensors = {name: tensor.to(torch.int8) for name, tensor in load_file(shard).items()}
    shard.unlink()
    save_file(tensors, shard, {"format": "pt"})
    (found,) = [finding for finding in inspect(folder) if isinstance(finding, Finding)]
    assert (found.rule, found.severity) == ("config", "note")


class TestAllow:
    def test_what_is_allowed_is_a_note(self, folder: Path) -> None:
        plant(folder, "notes/a.txt", "x")
        plant(folder, "notes/b.txt", f"token {HF}")
        plant(folder, "figure.svg", "<svg/>")
        allow = ["notes/*:unknown-file", "figure.svg:unknown-file"]
        (left,) = errors(check(folder, allow=allow))
        assert left.startswith("notes/b.txt:secret: holds a Hugging Face token")
        assert errors(check(folder, allow=[*allow, left.partition(": ")[0]])) == []

    @pytest.mark.parametrize("entry", ["figure.svg:unknown-file", "README.md:secret", "*:program"])
    def test_what_matches_nothing_is_an_error(self, entry: str, folder: Path) -> None:
        with pytest.raises(ValueError, match="matches nothing") as error:
            check(folder, allow=[entry])
        assert repr(entry) in str(error.value)

    @pytest.mark.parametrize("entry", ["README.md", "README.md:", ":secret", "README.md:anything"])
    def test_it_is_a_file_and_a_rule(self, entry: str, folder: Path) -> None:
        with pytest.raises(ValueError, match="FILE:RULE"):
            check(folder, allow=[entry])
