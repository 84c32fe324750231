import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import torch
from llamas import REFUSALS, Refusal, llama, prepared, snapshot
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import diffllama
from diffllama import DiffLlamaForCausalLM
from diffllama.cli import app, main


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Runs the command as the shell would, in this process. Returns its exit status and what stderr says."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["diffllama", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return end.value.code or 0, err


def module(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `python -m diffllama`."""
    command = [sys.executable, "-m", "diffllama", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def assert_one_line_of_error(err: str) -> str:
    """Checks that stderr ends in one line of error, the only one. Returns it."""
    lines = [line for line in err.splitlines() if line.strip()]
    assert [i for i, line in enumerate(lines) if line.startswith("Error: ")] == [len(lines) - 1]
    return lines[-1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "src")


@pytest.fixture(params=REFUSALS)
def refusal(request: pytest.FixtureRequest) -> Refusal:
    return REFUSALS[request.param]


def test_the_installed_command_is_main() -> None:
    (command,) = entry_points(group="console_scripts", name="diffllama")
    assert command.load() is main


def test_python_m_diffllama_converts_a_llama_and_then_refuses_to_replace_it(source: Path, tmp_path: Path) -> None:
    result = module("convert", source, tmp_path / "dest", "--from", "llama")
    assert (result.returncode, result.stdout) == (0, "")
    assert f"Reading {source}\n" in result.stderr
    assert result.stderr.splitlines()[-1] == f"Wrote {tmp_path / 'dest'}"
    ids = torch.arange(24).view(2, 12)
    original, converted = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("src", "dest"))
    assert type(converted) is DiffLlamaForCausalLM
    assert torch.equal(converted(ids).logits, original(ids).logits)

    before = snapshot(tmp_path)
    result = module("convert", source, tmp_path / "dest", "--from", "llama")
    assert (result.returncode, result.stdout) == (1, "")
    assert "Traceback" not in result.stderr
    assert "dest exists and is not empty" in assert_one_line_of_error(result.stderr)
    assert snapshot(tmp_path) == before


def test_python_m_diffllama_says_its_version() -> None:
    result = module("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"diffllama {diffllama.__version__}\n", "")
    assert diffllama.__version__ == version("diffllama")


def test_options_reach_the_conversion(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dest").mkdir()
    for name in ("old", "config.json"):
        (tmp_path / "dest" / name).touch()
    monkeypatch.chdir(tmp_path)
    status, err = call(capsys, "convert", "src", "dest", "--from=llama", "--dtype=bfloat16", "--overwrite")
    assert (status, err.splitlines()[-1]) == (0, f"Wrote {tmp_path / 'dest'}")
    assert not (tmp_path / "dest" / "old").exists()
    weights = load_file(tmp_path / "dest" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["with space", "[red]", "a[/b]", "ünï-模型", "100%", "{i}"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, dest = llama(tmp_path / name / "src"), tmp_path / name / "dest"
    status, err = call(capsys, "convert", source, dest, "--from", "llama")
    assert status == 0
    assert f"Reading {source}\n" in err
    assert err.splitlines()[-1] == f"Wrote {dest}"
    assert (dest / "config.json").is_file()


def test_what_cannot_be_converted_is_one_line_of_error(
    refusal: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, dest = prepared(refusal, tmp_path)
    before = snapshot(tmp_path)
    status, err = call(capsys, "convert", source, dest, "--from", "llama")
    assert status == 1
    assert_one_line_of_error(err)
    assert snapshot(tmp_path) == before


def test_an_interruption_ends_with_status_130_and_changes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    before = snapshot(tmp_path)
    monkeypatch.setattr(DiffLlamaForCausalLM, "save_pretrained", interrupt)
    status, _ = call(capsys, "convert", source, tmp_path / "dest", "--from", "llama")
    assert status == 130
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["convert", "SRC", "DEST"], "--from"),
        (["convert", "SRC", "--from", "llama"], "DEST"),
        (["convert", "--from", "llama"], "SRC"),
        (["convert", "SRC", "DEST", "MORE", "--from", "llama"], "MORE"),
        (["convert", "SRC", "DEST", "--from", "gpt2"], "'llama'"),
        (["convert", "SRC", "DEST", "--from", "llama", "--dtype", "int8"], "'bfloat16'"),
        (["convert", "SRC", "DEST", "--from", "llama", "--nonesuch"], "--nonesuch"),
        (["nonesuch"], "nonesuch"),
        (["--nonesuch"], "--nonesuch"),
        ([], "convert"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_told_what_is_wrong(arguments: list[str], told: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert told in result.output
    assert "Usage: " in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--help"], ("convert", "--version")),
        (["convert", "--help"], ("SRC", "DEST", "--from", "--dtype", "--overwrite", "bfloat16", "bit-identical")),
    ],
    ids=" ".join,
)
def test_help_names_what_there_is(arguments: list[str], told: tuple[str, ...]) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 0
    assert [word for word in told if word not in result.output] == []
