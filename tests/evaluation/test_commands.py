"""`diffllama probe …` on the command line."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from diffllama.cli import app, main
from diffllama.evaluation.commands import rounded, short, shown, tables
from diffllama.evaluation.probes import probe_class
from diffllama.evaluation.settings import PROBES
from support.tiny_loaded_models import tiny_loaded_model
from support.tiny_models import VARIANTS


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command as the shell would, in this process. Returns its exit status, stdout and stderr."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["diffllama", "probe", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return end.value.code or 0, out, err


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models llama, v1 and v2, and texts."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", *VARIANTS):
        loaded = tiny_loaded_model(kind)
        for part in (loaded.model, loaded.tokenizer):
            part.save_pretrained(folder / kind)
    (folder / "night.txt").write_text("It was a dark and stormy night. " * 20)
    (folder / "day.txt").write_text("The day after was bright and still. " * 20)
    return folder


def test_help_and_refusals_import_no_heavy_library() -> None:
    commands = {
        "--help": (0, [" eval ", " probe "]),
        "eval --help": (0, ["usage: lm-eval [-h] COMMAND"]),
        "eval run --nonesuch": (2, ["unrecognized arguments: --nonesuch"]),
        "probe --help": (0, [f" {name} " for name in PROBES]),
        "probe needles --help": (0, ["--samples"]),
        "probe icl-order --help": (0, ["trec-fine"]),
        "probe context": (2, ["Name either one MODEL"]),
        "probe logit-bits m --task nonesuch": (2, ["nonesuch"]),
        "probe attention m --depth nan": (2, ["--depth"]),
        "probe gradients --learning-rate inf": (2, ["--learning-rate must be a finite number"]),
    }
    code = """
import json, sys
from typer.testing import CliRunner
from diffllama.cli import app
heavy = {"datasets", "matplotlib", "torch", "transformers"}
for command in sys.argv[1:]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command.split())
    print(json.dumps([result.exit_code, result.output, sorted(heavy & set(sys.modules))]))
"""
    result = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    for (command, (expected_status, texts)), line in zip(commands.items(), lines, strict=True):
        status, output, imported = json.loads(line)
        assert (status, imported) == (expected_status, []), command
        assert [text for text in texts if text not in output] == [], command


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_has_its_class_and_says_where_the_paper_has_it(name: str) -> None:
    kind = probe_class(name)
    assert kind.command == name
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["probe", name, "--help"])
    assert result.exit_code == 0
    assert PROBES[name].__doc__ in result.output
    assert f"In the paper: {kind.paper}." in result.output
    for option, there in {
        "--output": True, "--seed": True, "--data": kind.takes_data, "--compare": kind.loads_models,
        "--trust-remote-code": kind.loads_models,
    }.items():  # fmt: skip
        assert (option in result.output) == there, option


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonesuch"], "nonesuch"),
        (["context"], "Name either one MODEL or two models with --compare A B"),
        (["context", "a", "--compare", "a", "b"], "Name either one MODEL or two models with --compare A B"),
        (["context", "--compare", "a", "a/"], "--compare needs two different models, got a twice"),
        (["context", "a", "b"], "b"),
        (["context", "a", "--length", "1"], "--length"),
        (["context", "a", "--dtype", "int8"], "bfloat16"),
        (["context", "a", "--nonesuch"], "--nonesuch"),
        (["scaling", "--compare", "a", "b"], "--compare"),
        (["throughput", "--data", "a"], "--data"),
        ([], "throughput"),
    ],
    ids=" ".join,
)
def test_wrong_command_line_exits_2_and_names_the_fault(arguments: list[str], message: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["probe", *arguments])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert message in result.output
    assert "Usage: " in result.output


def test_unmeasurable_input_is_one_line_of_error(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("{")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "empty").mkdir()
    llama, out = models / "llama", ("--output", tmp_path / "out")
    for arguments, message in {
        ("context", "nowhere", *out): "nowhere is not a folder with a config.json",
        ("context", "--compare", llama, "nowhere", *out): "nowhere is not a folder with a config.json",
        ("context", llama, "--data", "nowhere", *out): "nowhere does not exist. Name a file or folder with novels with",
        ("context", llama, "--data", tmp_path / "empty", *out): "has no text",
        ("context", llama, "--data", tmp_path / "broken.jsonl", *out): "broken.jsonl is not JSON",
        ("context", llama, "--length", "100000", *out): "has 100,000 tokens. Lower --length",
        ("context", llama, "--device", "abacus", *out): "abacus",
        ("context", llama, "--output", tmp_path / "file"): "file is not a folder. Name a folder with --output",
        ("scaling", "--data", tmp_path / "empty", *out): "has no losses.csv or losses.jsonl",
    }.items():
        status, stdout, err = call(capsys, *arguments)
        (line,) = [line for line in err.splitlines() if line.startswith("Error: ")]
        assert (status, stdout) == (1, ""), arguments
        assert message in line, arguments
        assert err.rstrip().endswith(line)
        assert not (tmp_path / "out" / "results.json").exists()


def test_probe_without_extra_names_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("diffllama.evaluation.probes.context", "diffllama.evaluation.figures"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    status, out, err = call(capsys, "context", "model")
    assert (status, out) == (1, "")
    assert err.startswith("Error: ModuleNotFoundError: ")
    assert "matplotlib" in err
    assert err.endswith("In a clone of diffllama: pip install '.[eval]'\n")


def test_two_models_are_measured_printed_and_not_measured_again(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, named = tmp_path / "[red] out", tmp_path / "[b]llama"
    named.symlink_to(models / "llama")
    arguments = ("context", "--compare", named, models / "v2", "--data", models, "--output", out)
    arguments += ("--length", 32, "--dtype", "bfloat16", "--seed", 7, "--device", "cpu")
    status, stdout, err = call(capsys, *arguments)
    assert (status, err.splitlines()[-1]) == (0, f"Wrote {out}")
    assert "built-in" not in err
    for text in ("[b]llama", "v2", "difference"):
        assert text in stdout
    results = json.loads((out / "results.json").read_text())
    assert results["settings"] == {"seed": 7, "length": 32, "texts": 8}
    assert results["data"]["path"] == str(models)
    assert [model["dtype"] for model in results["models"]] == ["bfloat16", "bfloat16"]
    assert [model["variant"] for model in results["models"]] == [None, "v2"]
    lines = stdout.splitlines()
    for row in results["rows"]:
        conditions = [shown(one["nll"]) for one in (*row["models"], row["difference"])]
        assert [
            line
            for line in lines
            if all(condition in line for condition in (f"{row['condition']['position']} ", *conditions))
        ]

    def measure(*arguments: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(probe_class("context"), "measure", measure)
    assert call(capsys, *arguments)[:2] == (0, stdout)


def test_options_reach_probe_that_makes_its_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "cpu", "--dtype", "bfloat16", "--variant", "v2", "--length", 4, "--length", 6)
    options += ("--rounds", 2, "--batch", 3, "--seed", 1, "--output", tmp_path)
    status, stdout, err = call(capsys, "throughput", *options)
    assert (status, err.splitlines()[-1]) == (0, f"Wrote {tmp_path}")
    assert "ratio" in stdout
    assert json.loads((tmp_path / "results.json").read_text())["settings"] == {
        "seed": 1, "size": None, "variant": "v2", "device": "cpu", "length": [4, 6], "batch": 3, "rounds": 2,
        "dtype": "bfloat16",
    }  # fmt: skip


def test_interrupted_command_keeps_samples_and_continues(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = probe_class("context")
    whole = kind.measure

    def measure(self: Any, loaded: Any, samples: Any) -> Any:
        measured = whole(self, loaded, samples)
        yield next(measured)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "measure", measure)
        arguments = ("context", models / "v1", "--length", 32, "--output", tmp_path / "out")
        assert call(capsys, *arguments)[0] == 130
    assert len((tmp_path / "out" / "samples-1.jsonl").read_text().splitlines()) == 2
    status, _, err = call(capsys, *arguments)
    assert status == 0
    assert "These numbers are of the small built-in sample" in err


def test_data_is_found_by_environment_variable(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFLLAMA_DATA", str(models / "night.txt"))
    assert call(capsys, "context", models / "v1", "--length", 16, "--output", tmp_path)[0] == 0
    assert json.loads((tmp_path / "results.json").read_text())["data"]["path"] == str(models / "night.txt")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (0.123456, "0.1235"), (-1.5, "-1.5"), (999.94, "999.9"), (1234.56, "1,235"), (-98765.4, "-98,765"),
        (1e10, "10,000,000,000"), (1e-7, "1e-07"), (float("inf"), "inf"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_numbers_are_rounded_for_tables(number: float, text: str) -> None:
    assert rounded(number) == text


def test_each_kind_of_condition_has_a_table() -> None:
    one = {"mean": 1.0, "low": 0.5, "high": float("nan")}
    report = SimpleNamespace(
        names=["[b]a", "b"],
        rows=[
            {"condition": {"length": 16, "depth": 0.5}, "samples": 1200, "models": [{"x": one}, {"x": {"mean": 2}}],
             "difference": {"x": {"mean": 1}}},
            {"condition": {"length": 32, "depth": 1e6}, "samples": 1,
             "models": [{"x": {"mean": 3}}, {"x": {"mean": 4}}]},
            {"condition": {"law": "[red]"}, "samples": 2, "models": [{}, {"y": {"mean": 5}}]},
        ],
    )  # fmt: skip
    first, second = tables(report)
    assert [column.header for column in first.columns] == [
        "length", "depth", "samples", "x\n[b]a", "x\nb", "x\ndifference",
    ]  # fmt: skip
    assert [list(column.cells) for column in first.columns] == [
        ["16", "32"], ["0.5", "1,000,000"], ["1,200", "1"], ["1 [0.5, nan]", "3"], ["2", "4"], ["1", ""],
    ]  # fmt: skip
    assert [column.header for column in second.columns] == ["law", "samples", "y\n[b]a", "y\nb"]
    assert [list(column.cells) for column in second.columns] == [["[red]"], ["2"], [""], ["5"]]
    console = Console(width=200, markup=False)
    with console.capture() as capture:
        console.print(first, second)
    for text in ("[b]a", "[red]", "1 [0.5, nan]"):
        assert text in capture.get()


def test_short_names_stay_distinct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short(["/models/llama/", "me/diff"]) == ["llama", "diff"]
    assert short(["a/model", "b/model"]) == ["a/model", "b/model"]
    assert short(["."]) == [tmp_path.name]


def test_texts_beyond_the_context_are_noted(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.txt").write_text("It was a dark and stormy night. " * 50)
    out = ("--data", tmp_path / "long.txt", "--texts", 1, "--output", tmp_path / "out")
    _, _, err = call(capsys, "context", models / "llama", "--length", 1100, *out)
    assert "1,100 tokens exceed the context of" in err


def test_narrow_terminal_truncates_no_number(models: Path, tmp_path: Path) -> None:
    arguments = ["--compare", "llama", "v1", "--data", ".", "--length", "64", "--texts", "2", "--output", tmp_path]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(models)
        result = CliRunner(env={"COLUMNS": "30"}).invoke(app, ["probe", "context", *map(str, arguments)])
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [len(row.split("│")) for row in rows] == [7] * 3  # at 16, 32 and 64 tokens
    assert "…" not in result.stdout
