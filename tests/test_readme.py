"""Every command and every piece of code in README.md runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import transformers
import yaml
from typer.testing import CliRunner

from diffllama.cli import app
from diffllama.configuration import preset
from diffllama.training.pretraining import MODEL_SOURCES, accumulation, read_settings
from support import subprocess_runner
from support.llama_checkpoints import SIZES, save_model
from support.tiny_models import tiny_model, tiny_tokenizer


ROOT = Path(__file__).parents[1]
PUBLISH = "Publish"
"""A section whose code needs the Hub; it runs in test_publishing.py."""

DEMO_FOLDER = "demo/SmolLM2-135M-Instruct-Diff"


def blocks(language: str) -> list[str]:
    """The README's code blocks in one language, but for those of the section `PUBLISH`."""
    sections = re.split(r"(?m)^## ", (ROOT / "README.md").read_text(encoding="utf-8"))
    text = "".join(section for section in sections if not section.startswith(PUBLISH))
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_code_runs_from_top_to_bottom(tmp_path: Path) -> None:
    folder = tmp_path / DEMO_FOLDER
    tiny_model("v2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    code = "\n".join(blocks("python")) + "\nassert differential[0].shape[1] * 2 == softmax[0].shape[1]\n"
    # the paper's sizes are too large to be made here; the text makes only their configurations
    code = f"import io, sys\nsys.stdout = io.StringIO()\n{code}facts['printed'] = sys.stdout.getvalue()"
    known, _ = subprocess_runner.run(code, environment=os.environ, cwd=tmp_path)
    assert known["printed"].strip(), "the pipeline's answer is printed"


def test_every_make_target_that_the_text_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named >= {"demo", "test"}
    assert named <= targets


def test_make_clean_keeps_what_the_examples_train() -> None:
    words = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    removed = {Path(word) for word in words if not word.startswith("-")}
    assert removed >= {Path("build"), Path(DEMO_FOLDER)}
    for file in (ROOT / "examples").glob("*.yaml"):
        output = Path(yaml.safe_load(file.read_text())["training"]["output_dir"])
        assert not removed & {output, *output.parents}, file


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()
    assert "make test " in blocks("sh")[0]


def test_commands_of_accelerate_fit_the_processes_of_their_file() -> None:
    lines = [line.split() for block in blocks("sh") for line in block.splitlines() if line.startswith("accelerate ")]
    assert len(lines) >= 1
    for words in lines:
        processes = yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())["num_processes"]
        settings = read_settings(ROOT / words[-1])
        assert words[-4:-1] == ["-m", "diffllama", "pretrain"]
        assert accumulation(settings, processes) >= 1
        assert not settings["training"].get("use_cpu")
        fields = {name: value for name, value in settings["model"].items() if name not in MODEL_SOURCES}
        config = preset(settings["model"]["preset"], **fields)
        assert config.max_position_embeddings >= settings["sequence_length"]


def test_commands_for_public_checkpoints_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def locate(src: str, *_: object) -> Path:
        asked.append(src)
        raise FileNotFoundError("no network")

    monkeypatch.setattr("diffllama.cli.locate", locate)
    text = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    commands = [line.split()[1:] for line in text.splitlines() if line.startswith("diffllama convert ")]
    for words in commands:
        result = CliRunner().invoke(app, words)
        assert str(result.exception) == "no network", result.output
    assert asked == [words[1] for words in commands]
    assert len(asked) >= 6


@pytest.mark.slow
def test_command_line_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "path/to/llama", transformers.LlamaConfig(**SIZES))
    save_model(tmp_path / "path/to/diffllama", transformers.DiffLlamaConfig(**SIZES))
    for folder in (DEMO_FOLDER, "tuned/merged"):
        tiny_model("v2").save_pretrained(tmp_path / folder)
        tiny_tokenizer().save_pretrained(tmp_path / folder)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    example = tmp_path / "examples/pretrain.yaml"  # as it is, but small
    settings = read_settings(example)
    settings["model"] |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    settings["training"] |= {"max_steps": 2, "save_steps": 2, "eval_steps": 2, "logging_steps": 1}
    example.write_text(yaml.safe_dump(settings))
    for text in ROOT.glob("*.md"):
        shutil.copy(text, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("diffllama ")]
    lines = [line for line in lines if not line.startswith("diffllama serve ")]  # runs in package/test_serving.py
    assert len(lines) >= 8
    for line in lines:
        words = line.partition(" #")[0].split()
        assert CliRunner().invoke(app, words[1:], catch_exceptions=False).exit_code == 0
        if words[1] == "pretrain":
            output = yaml.safe_load(Path(words[2]).read_text())["training"]["output_dir"]
            wrote = Path(output + "-baseline" * ("--baseline" in words), "model.safetensors")
        elif words[1] == "eval":
            (wrote,) = Path(words[-1]).rglob("results_*.json")
        elif words[1] == "memory":
            continue
        elif words[1] == "probe":
            wrote = Path(words[-1], "results.json")
        else:
            wrote = Path(words[3], "model.safetensors")
        assert wrote.is_file() or words[-1] == "--help"
