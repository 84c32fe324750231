import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import command
from benchmarks.cases import CASES


def called(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        command.main()
    return int(end.value.code or 0)


@pytest.fixture(autouse=True)
def restored() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.enable_progress_bar()


def test_list_shows_all_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert called(monkeypatch, "list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CASES)


def test_run_prints_and_writes_every_setting_and_where_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "results.json"
    options = ["--shape", "tiny", "--length", 17, "--length", 32, "--batch", 1, "--batch", 2, "--rounds", 2]
    options += ["--architecture", "v1", "--attention", "sdpa", "--threads", 1, "--groups", 2, "--device", "cpu"]
    options += ["--busy-cores", 1]
    assert called(monkeypatch, "run", "model/decode", "attention", *options, "--json", file) == 0
    report, printed = json.loads(file.read_text()), capsys.readouterr().out
    where = report["machine"]
    assert (where["threads"], where["torch"], where["transformers"]) == (1, torch.__version__, transformers.__version__)
    assert {"machine", "cores", "commit", "diffllama", "python", "time"} <= set(where)
    assert where["busy_cores"] == 1
    assert "'busy_cores': 1" in printed
    assert str(where["commit"]) in printed
    assert report["rounds"] == 2
    settings = [(result["case"], result["batch"], result["length"], result["groups"]) for result in report["results"]]
    cases = ("model/decode", "attention/prefill", "attention/train", "attention/decode")
    assert settings == [(case, batch, length, 2) for case in cases for batch in (1, 2) for length in (17, 32)]
    for result in report["results"]:
        assert list(result["implementations"]) == ["llama, sdpa", "ours V1, sdpa"]
        assert result["implementations"]["llama, sdpa"]["ratio"] == {"median": 1.0, "least": 1.0, "most": 1.0}
        assert all(len(row["milliseconds"]["rounds"]) == 2 for row in result["implementations"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model/predict"], "Unknown case or group 'model/predict'"),
        (["--architecture", "v3"], "Unknown architecture 'v3'"),
        (["--attention", "no_attention"], "Attention function 'no_attention'"),
        (["--shape", "7b"], "Unknown --shape '7b'. Known: tiny, small"),
        (["--shape", "small", "--groups", "5"], "The 12 heads of shape small cannot be divided into groups of 5"),
    ],
)
def test_name_that_does_not_exist_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert called(monkeypatch, "run", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"Error: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_run_in_which_something_was_refused_ends_with_status_1(
    functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    sdpa = functions["sdpa"]
    functions["sdpa"] = lambda *args, **kwargs: (2 * sdpa(*args, **kwargs)[0], None)
    assert called(monkeypatch, "run", "attention/decode", "--shape", "tiny", "--length", 9, "--device", "cpu") == 1
    assert "Refused: llama, sdpa: output attention differs" in capsys.readouterr().out
