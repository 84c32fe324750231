"""The statements of SECURITY.md hold."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from transformers import LlamaConfig

from diffllama import convert
from support import subprocess_runner
from support.llama_checkpoints import SIZES, save_model
from support.markdown import ROOT, blocks, commands
from support.tiny_models import VARIANTS, tiny_model, tiny_tokenizer


PAGE = ROOT / "SECURITY.md"
TEXT = PAGE.read_text(encoding="utf-8")
RAN = "code of the folder ran"

# --- the page itself ------------------------------------------------------------------------------------------------


def test_command_lists_the_python_files_of_a_folder(tmp_path: Path) -> None:
    ((command, _),) = commands(PAGE)
    tiny_model().save_pretrained(tmp_path)
    listed = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    *lines, total = [line.split() for line in listed.splitlines()]
    assert sorted(name for _, name in lines) == sorted(file.name for file in tmp_path.glob("*.py"))
    assert int(total[0]) == sum(int(count) for count, _ in lines) > 0
    for name in re.findall(r"`(\w+_diffllama\.py)`", TEXT):
        assert (tmp_path / name).is_file()


def test_cited_files_exist() -> None:
    cited = re.findall(r"`((?:tests|conversion|modeling_diff|src)/[\w/.]+)`", TEXT)
    assert cited
    assert [name for name in cited if not (ROOT / name).is_file()] == []


def test_python_code_compiles() -> None:
    code = blocks(PAGE, "python")
    assert code
    for block in code:
        compile(block.text, "SECURITY.md", "exec")


# --- which code runs, each time in fresh processes -------------------------------------------------------------------

PRELUDE = """
import sys
def outcome(auto, *args, **kwargs):
    try:
        return type(getattr(transformers, auto).from_pretrained(*args, **kwargs)).__module__
    except Exception as error:
        return str(error)
"""


def facts(code: str, work: Path) -> dict[str, str]:
    """Run code that fills the dictionary `facts`, in a fresh process with its caches in `work`."""
    caches = {"HF_HOME": str(work), "HF_HUB_CACHE": str(work / "hub"), "HF_MODULES_CACHE": str(work / "modules")}
    return subprocess_runner.facts(PRELUDE + code, caches | {"HF_HUB_OFFLINE": "1"}, cwd=work)


def save(folder: Path, variant: str = "v1", runs: bool = True) -> Path:
    """Save a folder of ours, with code that may or must not run."""
    tiny_model(variant).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    for file in () if runs else folder.glob("*.py"):
        file.write_text(f"raise RuntimeError({RAN!r})\n")
    return folder


@pytest.fixture(scope="module")
def with_package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Load several folders with the package imported. Returns the module of each class, or the error."""
    work = tmp_path_factory.mktemp("with_package")
    for variant in VARIANTS:
        save(work / variant, variant, runs=False)
    for name in ("tokenizer", "generation"):
        save(work / name)
    file = work / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    (work / "generation" / "custom_generate").mkdir()
    for name in ("tokenizer/evil.py", "generation/custom_generate/generate.py"):
        (work / name).write_text(f"raise RuntimeError({RAN!r})\n")
    return facts(
        """
import diffllama, transformers
for folder in ("v1", "v2"):
    for trust in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        for auto in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"):
            facts[f"{auto} {folder} {trust}"] = outcome(auto, folder, **trust)
        pipeline = transformers.pipeline("text-generation", model=folder, **trust)
        facts[f"pipeline {folder} {trust}"] = type(pipeline.model).__module__
for auto, folder in (("AutoTokenizer", "tokenizer"), ("AutoModelForCausalLM", "generation")):
    facts[f"{folder} untrusted"] = outcome(auto, folder)
    facts[f"{folder} trusted"] = outcome(auto, folder, trust_remote_code=True)
""",
        work,
    )


def test_with_the_package_no_code_of_the_folder_runs(with_package: dict[str, str]) -> None:
    modules = {name: module for name, module in with_package.items() if " v1 " in name or " v2 " in name}
    assert len(modules) == 30
    tokenizers = {name for name in modules if name.startswith("AutoTokenizer")}
    assert {modules[name].partition(".")[0] for name in tokenizers} == {"transformers"}
    models = {modules[name] for name in modules.keys() - tokenizers}
    assert models == {f"diffllama.modeling_diff.{name}_diffllama" for name in ("configuration", "modeling")}


def test_with_the_package_code_of_tokenizer_and_generation_runs_only_if_trusted(with_package: dict[str, str]) -> None:
    assert with_package["tokenizer trusted"] == with_package["generation trusted"] == RAN
    assert with_package["tokenizer untrusted"].startswith("transformers.")
    assert with_package["generation untrusted"].startswith("diffllama.")


def commit(work: Path, repository: str, hexadecimal: str, runs: bool = True, code_of: str | None = None) -> None:
    """Put a commit of a repository into the Hub's cache and make it `main`, with its own code or that of another."""
    cached = work / "hub" / f"models--{repository.replace('/', '--')}"
    folder = save(cached / "snapshots" / (40 * hexadecimal), runs=runs)
    if code_of is not None:
        for file in folder.glob("*.py"):
            file.unlink()
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {name: f"{code_of}--{reference}" for name, reference in config["auto_map"].items()}
        (folder / "config.json").write_text(json.dumps(config))
    (cached / "refs").mkdir(exist_ok=True)
    (cached / "refs" / "main").write_text(40 * hexadecimal)


def test_commit_pins_the_code_of_its_own_repository_only(tmp_path: Path) -> None:
    commit(tmp_path, "me/model", "a")
    commit(tmp_path, "me/model", "b", runs=False)
    commit(tmp_path, "me/tuned", "c", code_of="me/model")
    known = facts(
        """
sys.modules["diffllama"] = None
import transformers
a, c = 40 * "a", 40 * "c"
for auto in ("AutoModelForCausalLM", "AutoTokenizer"):
    for name, repository, pin in (
        ("main", "me/model", {}),
        ("pinned", "me/model", {"revision": a}),
        ("code pinned", "me/model", {"code_revision": a}),
        ("code elsewhere", "me/tuned", {"revision": c}),
        ("both pinned", "me/tuned", {"revision": c, "code_revision": a}),
    ):
        facts[f"{auto} {name}"] = outcome(auto, repository, trust_remote_code=True, **pin)
""",
        tmp_path,
    )
    pinned = f"transformers_modules.me.model.{40 * 'a'}.modeling_diffllama"
    for auto in ("AutoModelForCausalLM", "AutoTokenizer"):
        assert known[f"{auto} main"] == known[f"{auto} code elsewhere"] == RAN
        assert RAN not in {known[f"{auto} {name}"] for name in ("pinned", "code pinned", "both pinned")}
    assert {known[f"AutoModelForCausalLM {name}"] for name in ("pinned", "code pinned", "both pinned")} == {pinned}


@pytest.mark.parametrize("auto_class", ["AutoConfig", "AutoModelForCausalLM"])
def test_converting_runs_no_code_of_the_source(auto_class: str, tmp_path: Path) -> None:
    llama = save_model(tmp_path / "llama", LlamaConfig(**SIZES))
    ours = save(tmp_path / "ours", runs=False)
    config = json.loads((llama / "config.json").read_text()) | {"auto_map": {auto_class: "evil.Evil"}}
    (llama / "config.json").write_text(json.dumps(config))
    (llama / "evil.py").write_text(f"raise SystemExit({RAN!r})\n")
    converted = [
        convert(llama, tmp_path / "v2", source="llama"),
        convert(ours, tmp_path / "stock", target="transformers"),
    ]
    for folder in converted:
        assert (folder / "model.safetensors").is_file()
        assert RAN not in "".join(file.read_text() for file in folder.glob("*.py"))
