"""`check` reports everything that is planted in a folder, and nothing about valid folders."""

import base64
import io
import json
import os
import pickle
import shutil
import signal
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffllama import DiffLlamaForSequenceClassification, __version__
from diffllama.checkpoints.reading import open_checkpoint
from diffllama.hub_cards import checks
from diffllama.hub_cards.checks import check
from diffllama.hub_cards.file_checks import check_safetensors
from diffllama.hub_cards.findings import Finding, error_lines
from diffllama.hub_cards.folder_checks import inspect_folder
from diffllama.hub_cards.hub_folder import export
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP
from support.tiny_models import EVERY_FEATURE, VARIANTS, tiny_model, tiny_tokenizer


HF = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA12"
HEX = "0f1e2d3c4b5a69788796a5b4c3d2e1f001234567"
RANDOM = "q7Xw2Lp9Rk4Vb8Nz3Mt6"


class Call:
    """An object that is pickled as a call."""

    def __reduce__(self) -> Any:
        return os.system, ("echo x",)


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("x.txt", "x")
    return buffer.getvalue()


def tar_bytes() -> bytes:
    buffer = io.BytesIO()
    with tarfile.TarFile(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("x.txt"), io.BytesIO())
    return buffer.getvalue()


def safetensors_bytes(**metadata: str) -> bytes:
    header = json.dumps(
        {"__metadata__": metadata, "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


ZIP, TAR = zip_bytes(), tar_bytes()
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
ESCAPED = json.dumps({"x": HF}).replace("f", "\\u0066").encode()
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
    "pickle of numpy": ("array.npy", b"\x93NUMPY", "pickle"),
    "pickle of harmless classes": ("notes", pickle.dumps(Path("x")), "pickle"),
    "pickle by its suffix in capitals": ("optimizer.PT", b"", "pickle"),
    "pickle of INST": ("inst.dat", b"(S'echo x'\nios\nsystem\n.", "pickle"),
    "weights of torch": ("pytorch_model.bin", ZIP, "pickle"),
    "optimizer": ("checkpoint-5/optimizer.pt", ZIP, "pickle"),
    # archives
    "tar under another name": ("data.txt", TAR, "archive"),
    "zip behind a picture": ("picture.png", PNG + ZIP, "archive"),
    "zip under another name": ("NOTICE.zip", ZIP, "archive"),
    "gzip": ("x.gz", b"\x1f\x8b\x08" + bytes(9), "archive"),
    "bzip2": ("x.bz2", b"BZh91AY", "archive"),
    "xz": ("x.xz", b"\xfd7zXZ\0", "archive"),
    "7z": ("x.7z", b"7z\xbc\xaf\x27\x1c", "archive"),
    "zstd": ("x.zst", b"\x28\xb5\x2f\xfd" + bytes(9), "archive"),
    "rar": ("x.rar", b"Rar!\x1a\x07", "archive"),
    # programs
    "library": ("kernel.so", ELF, "program"),
    "ELF under another name": ("weights.data", ELF, "program"),
    "ELF as text": ("USE_POLICY.md", ELF, "program"),
    "program of Windows": ("setup.txt", b"MZ\x90\0", "program"),
    "program of macOS": ("setup", b"\xcf\xfa\xed\xfe", "program"),
    "static library": ("x.a", b"!<arch>\n", "program"),
    "Java": ("X.class", b"\xca\xfe\xba\xbe\0\0", "program"),
    "script under another name": ("run.txt", b"#!/usr/bin/env python\n", "program"),
    "bytecode": ("__pycache__/x.cpython-311.pyc", b"\xa7\r\r\n", "unknown-file"),
    "WebAssembly": ("x.wasm", b"\0asm\1\0\0\0", "program"),
    "requirements": ("requirements.txt", b"evil\n", "unknown-file"),
    # other models
    "adapter": ("adapter_config.json", b'{"base_model_name_or_path": "evil/model"}', "adapter"),
    "weights of an adapter": ("adapter_model.safetensors", safetensors_bytes(), "adapter"),
    "adapter in a folder": ("lora/adapter_config.json", b"{}", "adapter"),
    "weights of another model": ("other.safetensors", safetensors_bytes(), "unknown-file"),
    "ONNX": ("model.onnx", b"\x08\x07\x12\x07pytorch", "unknown-file"),
    "vocabulary in a folder": ("other/x.tiktoken", b"IQ== 0\n", "unknown-file"),
    "GGUF": ("model.gguf", b"GGUF\3\0\0\0" + bytes(64), "unknown-file"),
    "processor": ("preprocessor_config.json", b'{"auto_map": {"AutoProcessor": "x.Y"}}', "auto-map"),
    # code
    "generation's code": ("custom_generate/generate.py", b"import os\n", "other-code"),
    "code in a folder": ("a/b/c.py", b"import os\n", "other-code"),
    "code that hides": ("zero.py", b"x = 1\0\n", "content"),
    # secrets
    "secret in text": ("notes.txt", f"token {HF}".encode(), "secret"),
    "secret in UTF-16": ("utf16.txt", f"token {HF}".encode("utf-16"), "secret"),
    "secret in UTF-16 without a mark": ("utf16be.txt", f"token {HF}".encode("utf-16-be"), "secret"),
    "secret in UTF-32": ("utf32.txt", f"token {HF}".encode("utf-32"), "secret"),
    "secret in a notebook": ("train.ipynb", ESCAPED, "secret"),
    "secret in a file's name": (f"log-{HF}.txt", b"", "secret"),
    "secret in a folder's name": (f"{HF}/x.txt", b"", "secret"),
    "secret in safetensors": ("secret.safetensors", safetensors_bytes(note=HF), "secret"),
    "secret as a field": ("field.json", json.dumps({HF: 1}).encode(), "secret"),
    "secret in escapes": ("escaped.json", ESCAPED, "secret"),
    "named secret": ("named.json", b'{"hub_token": "abc"}', "secret"),
    "secret of GitLab": ("gitlab.txt", f"glpat-{RANDOM}".encode(), "secret"),
    "secret of GitHub": ("github.txt", f"ghp_{RANDOM}{RANDOM[:16]}".encode(), "secret"),
    "secret of W&B": ("wandb.env", f"WANDB_API_KEY={HEX}".encode(), "secret"),
    "secret of OpenAI": ("openai.env", f"OPENAI=sk-proj-{RANDOM}{RANDOM}".encode(), "secret"),
    "secret of AWS": ("aws.env", b"AKIAQ7XW2LP9RK4VB8NZ", "secret"),
    "secret of Slack": ("slack.txt", f"xoxb-12345678901-{RANDOM.lower()}".encode(), "secret"),
    "secret of PyPI": ("pypirc", f"pypi-AgEIcHlwaS5vcmc{RANDOM * 4}".encode(), "secret"),
    "secret in a URL": ("url.txt", b"git clone https://me:Tr0ub4dor3@example.org/x", "secret"),
    "secret in YAML": ("settings.yaml", f"db:\n  password: {RANDOM}\n".encode(), "secret"),
    "JSON web token": ("jwt.txt", b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.x", "secret"),
    "private key": ("id_rsa", b"-----BEGIN OPENSSH PRIVATE KEY-----", "secret"),
    # paths
    "path in text": ("paths.txt", b"saved to /home/me/models/x", "path"),
    "path in a notebook": ("path.ipynb", rb'["open(\u0022\u002fUsers\u002fme\u002fx\u0022)"]', "path"),
    "path in code": ("where.py", b"PATH = '/scratch/me/x'\n", "path"),
    "path of Windows": ("windows.txt", b"C:\\Users\\me\\x", "path"),
    "path in JSON": ("path.json", b'{"a": {"path": "/data/llama/weights"}}', "path"),
    "path of another disk in JSON": ("disk.json", b'{"x": "D:\\\\models\\\\x"}', "path"),
    "path of Windows in JSON": ("windows.json", b'{"cmd": "C:\\\\Users\\\\me\\\\out"}', "path"),
    "path in a command": ("command.json", b'{"cmd": "train --out /home/me/out"}', "path"),
    # broken
    "cut JSON": ("special_tokens_map.json", b'{"cut off', "json"),
    "NaN in JSON": ("added_tokens.json", b'{"x": NaN}', "json"),
    "deep JSON": ("tekken.json", b"[" * 100_000, "json"),
    "UTF-16 as text": ("CITATION.cff", "title: x".encode("utf-16"), "content"),
    "no picture": ("figure.png", b"hello", "content"),
    "more than a picture": ("more.png", PNG + b"hello", "content"),
    "no tokenizer": ("spiece.model", b"\x0a\xff\xff\xff\xff\x0f\x00", "content"),
    "cut weights": ("cut.safetensors", safetensors_bytes()[:-1], "weights"),
}  # fmt: skip
"""Description -> file, content, and a rule that it violates. All of them are planted into one folder."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder with shards."""
    folder = tmp_path_factory.mktemp("sound")
    tiny_model("v2", **EVERY_FEATURE).save_pretrained(folder / "src")
    tiny_tokenizer().save_pretrained(folder / "src")
    exported = export(folder / "src", folder / "dest", metadata={"license": "mit"}, max_shard_size="100KB")
    assert inspect(exported) == []  # imports once what each process of `check` would import
    return exported


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of the valid folder to change. Its files are links: replace them, do not write into them."""
    return shutil.copytree(sound, tmp_path / "folder", copy_function=os.link)


def inspect(folder: Path) -> list[Finding]:
    """Return the findings of `check`, without its process."""
    return [finding for finding in dict.fromkeys(inspect_folder(folder)) if isinstance(finding, Finding)]


def plant(folder: Path, name: str, content: bytes | str) -> None:
    """Write a file, replacing an existing one."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def edit(folder: Path, name: str, **fields: Any) -> None:
    """Set fields in a JSON file."""
    plant(folder, name, json.dumps(json.loads((folder / name).read_text()) | fields))


class TestFiles:
    @pytest.fixture(scope="class")
    def findings(self, sound: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
        folder = shutil.copytree(sound, tmp_path_factory.mktemp("planted") / "folder", copy_function=os.link)
        for name, content, _ in FILES.values():
            plant(folder, name, content)
        return check(folder)

    @pytest.mark.parametrize("what", FILES)
    def test_planted_file_violates_its_rule(self, what: str, findings: list[Finding]) -> None:
        name, _, rule = FILES[what]
        about = [finding for finding in findings if finding.file == name and finding.severity == "error"]
        assert rule in {finding.rule for finding in about}, about

    def test_nothing_else_is_reported_and_nothing_twice(self, findings: list[Finding]) -> None:
        assert {finding.file for finding in findings} == {name for name, _, _ in FILES.values()}
        assert len(findings) == len(set(findings))

    def test_messages_name_secrets_without_showing_them(self, findings: list[Finding]) -> None:
        for finding in findings:
            for secret in (HF, HEX, RANDOM):
                assert secret[8:] not in finding.message
        lines = {str(finding) for finding in findings}
        for line in (
            "notes.txt:secret: contains a secret: Hugging Face token (hf_aB3…)",
            "named.json:secret: `hub_token` is a secret",
            "path.json:path: `a.path` is or contains a local path: '/data/llama/weights'",
            "added_tokens.json:json: is not valid JSON: NaN is not a number in JSON",
        ):
            assert line in lines


def huge(folder: Path) -> None:
    with (folder / "huge.dat").open("wb") as file:
        file.truncate(1 << 40)


def loop(folder: Path) -> None:
    (folder / "a.txt").symlink_to(folder / "b.txt")
    (folder / "b.txt").symlink_to(folder / "a.txt")


def shard(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    """Change the tensors of a shard."""

    def spoil(folder: Path) -> None:
        file = min(folder.glob("model-*.safetensors"))
        tensors = change(load_file(file))
        file.unlink()
        save_file(tensors, file, {"format": "pt"})

    return spoil


def with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    max(tensors.values(), key=torch.numel).view(-1)[-1] = torch.nan
    return tensors


def rewrite(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Replace a part of a file."""
    return lambda folder: plant(folder, name, (folder / name).read_text().replace(old, new, 1))


def put(name: str, content: bytes | str) -> Callable[[Path], None]:
    return lambda folder: plant(folder, name, content)


def fields(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, name, **values)


template = partial(put, "chat_template.jinja")
config, settings = partial(fields, "config.json"), partial(fields, "tokenizer_config.json")


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: plant(folder, name, (folder / name).read_bytes()[:-5])


def card(text: str) -> Callable[[Path], None]:
    return rewrite("README.md", "---\n", f"---\n{text}\n")


def swap_shards(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensor, shard = next(iter(index["weight_map"].items()))
    other = next(name for name in index["weight_map"].values() if name != shard)
    edit(folder, "model.safetensors.index.json", weight_map=index["weight_map"] | {tensor: other})


def larger_tokenizer(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["w97", "w98"])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    tokenizer.save_pretrained(folder)


def quantized(folder: Path) -> None:
    edit(folder, "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    shard(lambda tensors: {name: tensor.to(torch.int8) for name, tensor in tensors.items()})(folder)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HARD = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3

FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard too many": (
        put("model-00009-of-00009.safetensors", safetensors_bytes()),
        "model-00009-of-00009.safetensors:unknown-file",
    ),
    "huge file": (huge, "huge.dat:unknown-file"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe.safetensors"), "pipe.safetensors:special-file"),
    "loop of links": (loop, "a.txt:link"),
    "link out of the folder": (lambda folder: (folder / "NOTICE").symlink_to("/etc/hostname"), "NOTICE:link"),
    "link to a folder": (lambda folder: (folder / "again").symlink_to(folder), "again:link"),
    "NaN": (shard(with_nan), ":non-finite"),
    "os.system in the model's code": (
        rewrite("modeling_diffllama.py", "import torch\n", "import torch\nimport os\nos.system('echo x')\n"),
        "modeling_diffllama.py:code-differs",
    ),
    "code that is nested too deeply": (
        put("differential_attention.py", "x = " + "(" * 50_000),
        "differential_attention.py:code",
    ),
    "a field twice": (rewrite("config.json", "{", '{"model_type": "llama",'), "config.json:json"),
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
    "template of another name": (
        put("additional_chat_templates/tools.jinja", "{{ messages['__class__'] }}"),
        "additional_chat_templates/tools.jinja:template",
    ),
    "template that is none": (template("{% if %}"), "chat_template.jinja:template"),
    "secret in a template": (template(f"{{# {HF} #}}"), "chat_template.jinja:secret"),
    "secret in a card": (card(f"note: {HF}"), "README.md:secret"),
    "path in a card": (card("base_model: /tmp/me/model"), "README.md:path"),
    "metadata that are none": (card("license: [\n"), "README.md:card"),
    "aliases in a card": (card(BOMB), "README.md:card"),
    "cut index": (cut("model.safetensors.index.json"), "model.safetensors.index.json:json"),
    "cut weights": (cut("model-00001-of-00004.safetensors"), "model-00001-of-00004.safetensors:weights"),
    "missing code": (
        lambda folder: (folder / "differential_attention.py").unlink(),
        "differential_attention.py:code: is missing: `diffllama export` writes it",
    ),
    "more code than the model's": (
        config(auto_map=AUTO_MAP | {"AutoModelForMaskedLM": "a.B"}),
        "config.json:auto-map: `auto_map` must not have AutoModelForMaskedLM, got 'a.B'",
    ),
    "another model": (config(model_type="llama"), "config.json:config: `model_type` must be 'diff_llama', got 'llama'"),
    "a configuration that is refused": (
        config(num_attention_heads=7), "config.json:config: cannot be read: StrictDataclassFieldValidationError"
    ),
    "another architecture": (
        config(architectures=["LlamaForCausalLM"]),
        "config.json:config: cannot be read: ValueError: `architectures` in config.json must be one of Diff",
    ),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json:config: is missing"),
    "no weights": (lambda folder: [file.unlink() for file in folder.glob("model[.-]*")], "model.safetensors:weights"),
    "a shard too few": (
        lambda folder: min(folder.glob("model-*.safetensors")).unlink(),
        "model-00001-of-00004.safetensors",
    ),
    "weights of another shape": (
        config(vocab_size=98),
        "model.safetensors.index.json:weights: misshapen: model.embed_tokens.weight [97, 64], must be [98, 64]",
    ),
    "weights of another name": (
        shard(lambda tensors: tensors | {"renamed": tensors.pop(min(tensors))}),
        "model.safetensors.index.json:weights: extra: renamed",
    ),
    "an index that is wrong": (
        fields("model.safetensors.index.json", metadata={"total_size": 1}),
        "model.safetensors.index.json:weights: `total_size` must be ",
    ),
    "an index of other shards": (swap_shards, "model.safetensors.index.json:weights: names the wrong shard"),
    "a larger tokenizer": (
        larger_tokenizer, "tokenizer_config.json:tokenizer: the tokenizer has 99 tokens, the model only 97"
    ),
    "a tokenizer that does not load": (put("tokenizer.json", "{}"), "tokenizer_config.json:tokenizer: cannot be read"),
    "generation settings that do not load": (
        fields("generation_config.json", max_new_tokens="many"),
        "generation_config.json:generation: ",
    ),
}  # fmt: skip
"""Description -> what spoils a folder, and how the text of an error begins, or what it contains."""

NOTES: dict[str, tuple[Callable[[Path], None], str]] = {
    "other dtype": (
        config(dtype="bfloat16"),
        "model.safetensors.index.json:weights: has torch.float32, and `dtype` in config.json is torch.bfloat16",
    ),
    "no dtype": (
        config(dtype=None),
        "model.safetensors.index.json:weights: has torch.float32, and `dtype` in config.json is None",
    ),
    "contradicting settings": (
        fields("generation_config.json", do_sample=False, temperature=0.5),
        "generation_config.json:generation: GenerationConfig is invalid",
    ),
    "no settings": (
        lambda folder: (folder / "generation_config.json").unlink(), "generation_config.json:generation: is missing"
    ),
    "no licence in the card": (put("README.md", "---\ntags: [x]\n---\n"), "README.md:licence: names no licence"),
    "hidden file": (put(".env", "x"), ".env:hidden-file: is hidden"),
    "template that refuses": (
        template("{{ raise_exception('no') }}"), "chat_template.jinja:template: refuses a greeting"
    ),
    "quantized weights": (quantized, "config.json:config: `quantization_config`"),
}  # fmt: skip
"""Description -> what changes a folder, and how the text of its only finding, a note, begins."""


SEVERAL = {
    "loop of links": 2, "experts of a kernel": 2, "code of another repository": 6, "path in a card": 2,
    "template that reaches for __init__": 3, "weights of another shape": 2,
    "weights of another name": 2,
}  # fmt: skip
"""How many findings these have; the others have one."""


@pytest.mark.parametrize("what", FOLDERS)
def test_spoiled_folder_is_an_error(what: str, folder: Path) -> None:
    spoil, expected = FOLDERS[what]
    spoil(folder)
    findings = inspect(folder)
    assert any(expected in line for line in error_lines(findings)), findings
    assert len(findings) == SEVERAL.get(what, 1), findings


def test_arguments_are_checked_before_files(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        check(folder / "nowhere")
    with pytest.raises(ValueError, match="must be FILE:RULE"):
        check(folder, allow=["README.md"])


@pytest.mark.parametrize("what", NOTES)
def test_harmless_oddity_is_a_note(what: str, folder: Path) -> None:
    change, expected = NOTES[what]
    change(folder)
    (finding,) = inspect(folder)
    assert str(finding).startswith(expected)
    assert finding.severity == "note"


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
    def test_template_beyond_a_limit_is_reported(
        self, text: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checks, "TIME_LIMIT", 2 if text == HARD else 60)
        monkeypatch.setattr(checks, "MEMORY_LIMIT", 2**30)
        plant(folder, "chat_template.jinja", text)
        (finding,) = check(folder)
        assert str(finding).startswith(f"chat_template.jinja:limits: {message}")

    def test_crash_is_reported(self, tmp_path: Path) -> None:
        def crash(folder: Path) -> Iterator[Finding | str]:
            yield "bad.model"
            os.kill(os.getpid(), signal.SIGKILL)

        (finding,) = checks.run_isolated(crash, tmp_path)
        assert str(finding).startswith("bad.model:limits: crashes the process that reads it (exit code -9)")


SENTENCEPIECE = b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02" + b"\x12\x02\x18\x01"
"""A model with one piece and a specification, as SentencePiece writes them."""

SOUND: dict[str, bytes | str] = {
    "tokenizer.model": SENTENCEPIECE,
    "spiece.model": SENTENCEPIECE + SENTENCEPIECE,
    "vocab.json": '{"a": 0, "/home/me": 1, "sk-learn-contrib-lightning-estimators": 2}',
    "tekken.json": '{"vocab": [{"token_str": "/home/me"}]}',
    "merges.txt": "#version: 0.2\nc at\n/home /me\n",
    "vocab.txt": "config\nfoo\n/tmp/x\n",
    "x.tiktoken": "IQ== 0\nIg== 1\n",
    "special_tokens_map.json": '{"bos_token": "<s>"}',
    "added_tokens.json": '{"w96": 96}',
    "chat_template.jinja": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "additional_chat_templates/tool_use.jinja": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "losses.png": PNG,
    "figures/maps.png": PNG,
    "a.gif": b"GIF89a\1\0\1\0\0\0\0;",
    "LICENSE-CODE": "(c) 2026\nus\n",
    "NOTICE.txt": "copyright\nholders\n",
    "USE_POLICY.md": "Be good.",
    ".gitattributes": "*.safetensors filter=lfs\n",
    ".cache/huggingface/x.lock": "",
    "evaluation.json": '{"results": []}',
    "conversion.json": '{"tool": "diffllama"}',
    # texts that look like secrets and paths
    "README.md": "---\nlicense: mit\n---\nsk-learn-contrib-lightning-estimators, POST /v1/chat/completions, "
    "hf_xxxxxxxxxxxxxxxxxxxx https://user:password@example.org OPENAI_API_KEY=your-key-here api_key='none' "
    f"password: secret commit {HEX} sha256 {HEX}{HEX[:24]}\n",
    "training.json": '{"endpoint": "/v1/chat/completions", "arguments": {"optim": "adamw_torch"}, '
    '"texts": ["</s>", "/think", "//", "https://a.org/home/me", "a: b\\n", ""]}',
}


def test_sound_folder_has_no_findings(folder: Path) -> None:
    for name, content in SOUND.items():
        plant(folder, name, content)
    plant(folder, "tokenizer.json", (folder / "tokenizer.json").read_text().replace('"w95"', '"/home/me/x"'))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"][0] | {"id": 95, "content": "/home/me/x"}
    edit(folder, "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], added])
    edit(folder, "tokenizer_config.json", chat_template="{# /home/me/x #}")
    edit(folder, "config.json", is_causal=True)
    assert inspect(folder) == []


def test_different_code_can_be_allowed(folder: Path) -> None:
    name = "differential_attention.py"
    plant(folder, name, f"{(folder / name).read_text()}x = 1\n")
    plant(folder, "handler.py", "import flask\n")
    differs, other = error_lines(inspect(folder))
    assert differs.startswith(f"{name}:code-differs: differs from diffllama {__version__}; it is from diffllama")
    assert ": +1 -0 lines. `diffllama export` writes the package's code" in differs
    assert other == "handler.py:other-code: does not belong to the model"
    allow = [f"{name}:code-differs", "handler.py:other-code"]
    assert {finding.severity for finding in check(folder, allow=allow)} == {"note"}


def test_snapshot_in_the_cache_of_the_hub_has_no_findings(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "snapshots" / "0123").mkdir(parents=True)
    shutil.move(folder, tmp_path / "model" / "blobs")
    for blob in (tmp_path / "model" / "blobs").iterdir():
        (tmp_path / "model" / "snapshots" / "0123" / blob.name).symlink_to(blob)
    assert check(tmp_path / "model" / "snapshots" / "0123") == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_of_save_pretrained_lacks_tokenizer_licence_and_card(variant: str, tmp_path: Path) -> None:
    tiny_model(variant).save_pretrained(tmp_path)
    findings = inspect(tmp_path)
    assert [finding.file for finding in findings] == ["tokenizer.json", "LICENSE", "README.md"]
    assert error_lines(findings) == []


def test_weights_must_be_those_of_the_architecture(tmp_path: Path) -> None:
    DiffLlamaForSequenceClassification(tiny_model().config).save_pretrained(tmp_path)
    assert error_lines(inspect(tmp_path)) == []
    edit(tmp_path, "config.json", architectures=["DifferentialLlamaForCausalLM"])
    assert error_lines(inspect(tmp_path)) == [
        "model.safetensors:weights: missing: lm_head.weight [97, 64]",
        "model.safetensors:weights: extra: score.weight [2, 64]",
    ]


def test_code_of_the_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*.py"):
        plant(folder, file.name, f"{file.read_text()}\nopen({str(tmp_path / 'run')!r}, 'w')\n")
    check(folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_weights_larger_than_the_limit_of_memory_are_read(tmp_path: Path) -> None:
    file, size = tmp_path / "model.safetensors", checks.MEMORY_LIMIT + 2**30
    header = json.dumps({"x": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + size)  # a hole in the file

    def read(folder: Path) -> Iterator[Finding]:
        yield from check_safetensors(file, file.name)
        assert not next(open_checkpoint(folder).pieces("x")).any()

    assert checks.run_isolated(read, tmp_path) == []
