"""Every command and Python block of README.md and docs/ runs here, or in the test that is named."""

import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import conversion, gpu, serving
from benchmarks.command import app as benchmarks
from diffllama.cli import app
from diffllama.configuration import preset
from diffllama.training.pretraining import MODEL_SOURCES, accumulation, read_settings
from support import subprocess_runner
from support.llama_checkpoints import SIZES, save_model
from support.markdown import PAGES, ROOT, blocks, commands
from support.tiny_models import tiny_model, tiny_tokenizer


DEMO = "demo/SmolLM2-135M-Instruct-Diff"

RUN_ELSEWHERE = {
    "diffllama --install-completion": "tests/package/test_cli.py",
    "diffllama explore": "tests/explorer/test_browser.py",
    "diffllama serve": "tests/package/test_serving.py",
    "lm_eval --model vllm": "tests/engines/test_lm_eval.py",
    "hf upload": "tests/explorer/test_space.py",
    "vllm serve": "tests/engines/test_server.py",
    "wc -l": "tests/test_security.py",
    ".ci/run": ".github/workflows/ci.yml",
}
"""How a command begins -> the file that runs it."""

NEEDS = {
    "needs the Hub": "tests/test_publishing.py",
    "needs 8 GPUs": "tests/training/test_processes.py",
    "needs llm-compressor": "tests/engines/quantize.py",
    "needs torchao": "tests/package/test_torchao.py",
    "needs vLLM": "tests/engines/test_server.py",
    "needs a running server": "tests/support/openai_server_suite.py",
}
"""Title of a block -> the file that runs it, or what can be run of it without that."""

LINES = [(page.name, line, title) for page in PAGES for line, title in commands(page)]


def lines_of(*beginnings: str, title: str | None = "") -> list[str]:
    """Return the commands with a beginning, of blocks with a title (`None`: any)."""
    return [line for _, line, of in LINES if line.startswith(beginnings) and title in (None, of)]


def make_target(line: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert line.split()[1] in targets


def install(line: str) -> None:
    from packaging.requirements import Requirement

    (what,) = shlex.split(line)[2:]
    extras = re.search(r"\[(.*)\]", what)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if what.startswith("."):
        assert extras is None or re.search(rf"(?m)^{extras.group(1)} = \[", project)
    else:
        assert Requirement(what)


def benchmark(line: str) -> None:
    program, *words = shlex.split(line)[2:]
    commands = {
        "benchmarks": benchmarks,
        "benchmarks.conversion": conversion,
        "benchmarks.gpu": gpu,
        "benchmarks.serving": serving,
    }
    command = commands[program]
    if program == "benchmarks":
        name, *words = words
        command = get_command(command).commands[name]
    else:
        import typer

        single = typer.Typer()
        single.command()(command.main)
        command = get_command(single)
    command.make_context(program, words)


def example(line: str) -> None:
    _, file = line.split()
    assert (ROOT / file).is_file()
    assert (ROOT / "tests/examples" / f"test_{Path(file).name}").is_file()


def launch(line: str) -> None:
    """Check that the settings fit the processes of accelerate's file."""
    words = line.split()
    processes = yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())["num_processes"]
    settings = read_settings(ROOT / words[-1])
    assert words[-4:-1] == ["-m", "diffllama", "pretrain"]
    assert accumulation(settings, processes) >= 1
    assert not settings["training"].get("use_cpu")
    fields = {name: value for name, value in settings["model"].items() if name not in MODEL_SOURCES}
    config = preset(settings["model"]["preset"], **fields)
    assert config.max_position_embeddings >= settings["sequence_length"]


CHECKS: dict[str, Callable[[str], None]] = {
    "make ": make_target,
    "pip install ": install,
    "python -m benchmarks": benchmark,
    "python examples/": example,
    "accelerate launch ": launch,
}
"""How a command begins -> a check of it; CI runs the targets of make and installs the package."""


@pytest.mark.parametrize("line", sorted({line for _, line, _ in LINES if not line.startswith("diffllama ")}))
def test_command_is_understood(line: str) -> None:
    checks = [check for beginning, check in CHECKS.items() if line.startswith(beginning)]
    elsewhere = [file for beginning, file in RUN_ELSEWHERE.items() if line.startswith(beginning)]
    assert len(checks + elsewhere) == 1, f"no test runs {line!r}"
    for check in checks:
        check(line)


def test_blocks_that_do_not_run_anywhere_say_what_they_need() -> None:
    titles = {block.title for page in PAGES for block in blocks(page)} - {""}
    assert titles == NEEDS.keys()
    for file in {*NEEDS.values(), *RUN_ELSEWHERE.values()}:
        assert (ROOT / file).is_file()


def test_commands_for_public_checkpoints_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def locate(src: str, *_: object) -> Path:
        asked.append(src)
        raise FileNotFoundError("no network")

    monkeypatch.setattr("diffllama.cli.locate", locate)
    lines = [line.split()[1:] for line in lines_of("diffllama convert ", title="needs the Hub")]
    for words in lines:
        result = CliRunner().invoke(app, words)
        assert str(result.exception) == "no network", result.output
    assert asked == [words[1] for words in lines]
    assert len(asked) >= 4


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small versions of the pages' files: the demo model, a fine-tuned one, checkpoints to convert."""
    save_model(tmp_path / "path/to/llama", transformers.LlamaConfig(**SIZES))
    save_model(tmp_path / "path/to/diffllama", transformers.DiffLlamaConfig(**SIZES))
    for folder in (DEMO, "tuned/merged"):
        tiny_model("v2").save_pretrained(tmp_path / folder)
        tiny_tokenizer().save_pretrained(tmp_path / folder)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_code_runs_from_top_to_bottom_of_each_page(work: Path) -> None:
    code = "import io, sys\nsys.stdout = io.StringIO()\n"
    ran = []
    for page in PAGES:
        if texts := [block.text for block in blocks(page, "python") if not block.title]:
            code += f"exec(compile({''.join(texts)!r}, {page.name!r}, 'exec'), names := {{}})\n"
            ran.append(page.name)
            if page.name == "index.md":  # the shapes of its maps
                code += "assert names['differential'][0].shape[1] * 2 == names['softmax'][0].shape[1]\n"
    code += "facts['printed'] = sys.stdout.getvalue()"
    known, _ = subprocess_runner.run(code, environment=os.environ, cwd=work)
    assert {"README.md", "index.md", "configuration.md", "convert.md", "fine_tune.md"} <= {*ran}
    assert "32 4" in known["printed"].splitlines()  # how_it_works.md


@pytest.mark.slow
def test_command_line_runs_from_top_to_bottom(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings(work / "examples/pretrain.yaml")  # unchanged except for its sizes
    settings["model"] |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    settings["training"] |= {"max_steps": 2, "save_steps": 2, "eval_steps": 2, "logging_steps": 1}
    (work / "examples/pretrain.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
    lines = [line for line in lines_of("diffllama ") if not line.startswith(tuple(RUN_ELSEWHERE))]
    assert {line.split()[1] for line in lines} >= {"convert", "pretrain", "eval", "probe", "memory"}
    for line in dict.fromkeys(lines):
        words = shlex.split(line)
        if words[1:3] in (["probe", "gradients"], ["probe", "throughput"]):
            continue  # takes minutes; test_evaluate.py checks the options, tests/evaluation/probes runs small versions
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert result.exit_code == 0, (line, result.output)
        if words[1] == "convert":
            assert Path(words[3], "model.safetensors").is_file()
        elif words[1] == "pretrain":
            output = yaml.safe_load(Path(words[2]).read_text())["training"]["output_dir"]
            assert Path(output + "-baseline" * ("--baseline" in words), "model.safetensors").is_file()
        elif words[1] == "eval":
            assert len([*Path(words[-1]).rglob("results_*.json")]) == 1
        elif words[1] == "export":
            assert Path(words[3], "app.py").is_file() == ("--space" in words)
        elif words[1] == "probe" and words[-1] != "--help":
            assert Path(words[-1], "results.json").is_file()
        else:
            assert words[-1] == "--help" or words[1] == "memory"
