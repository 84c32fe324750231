import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import gpu


app = typer.Typer()
app.command()(gpu.main)


def row(ratio: float, goal: float | None = None) -> dict[str, Any]:
    limits = {"goal": {"at_most": goal, "below": None, "met": ratio <= goal}} if goal else {}
    return {"milliseconds": {"median": 10 * ratio}, "ratio": {"median": ratio}, "step_mb": 1.5, **limits}


def result(case: str, length: int = 512, **ratios: float) -> dict[str, Any]:
    rows = {"llama, sdpa": row(1), **{f"ours V1, {name}": row(ratio) for name, ratio in ratios.items()}}
    return {"case": case, "dtype": "bfloat16", "batch": 1, "length": length, "implementations": rows, "refused": {}}


def test_function_with_the_lowest_mean_ratio_over_all_cases_is_preferred() -> None:
    results = [
        result("attention/prefill", sdpa=2, diff_attention=1, flash_attention_2=0.5),
        result("attention/train", sdpa=2, diff_attention=1.5),
        result("attention/decode", sdpa=1, diff_attention=1.5, flash_attention_2=1.2),
        result("attention/decode", 4096, sdpa=1),
        result("model/decode", sdpa=9),
    ]
    assert gpu.preferred(results) == [
        {
            "architecture": "ours V1", "dtype": "bfloat16", "length": 512, "attention/prefill": "flash_attention_2",
            "attention/train": "diff_attention", "attention/decode": "sdpa", "default": "diff_attention",
        },
        {
            "architecture": "ours V1", "dtype": "bfloat16", "length": 4096, "attention/prefill": None,
            "attention/train": None, "attention/decode": "sdpa", "default": None,
        },
    ]  # fmt: skip


TESTS = """
import pytest

pytestmark = pytest.mark.gpu
if {fails}:
    def test_wrong(): assert 0
def test_right(): pass
def test_absent(): pytest.skip("no card")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run parts with tiny sizes on the CPU, or a test of its own. Returns the exit status, the report and its page."""

    def run(*parts: str, fails: bool = False, **options: Any) -> tuple[int, dict[str, Any], str]:
        test = tmp_path / "test_tiny.py"
        test.write_text(TESTS.replace("{fails}", str(fails)))
        monkeypatch.setattr(gpu, "TESTS", {"kernels": ["-p", "no:cacheprovider", str(test)]})
        defaults = {"device": "cpu", "shape": "tiny", "length": 17, "rounds": 1}
        words = [word for name, value in (defaults | options).items() for word in (f"--{name}", str(value))]
        words += [word for part in parts for word in ("--part", part)]
        status = CliRunner().invoke(app, [str(tmp_path / "gpu"), *words]).exit_code
        page = tmp_path / "gpu/gpu.md"
        return status, *(
            (json.loads(page.with_suffix(".json").read_text()), page.read_text()) if page.is_file() else ()
        )

    return run


@pytest.mark.slow
def test_parts_run_and_are_told_together(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        gpu.RUNS, "attention-float32", ["attention/decode", "--dtype", "float32", "--architecture", "v1"]
    )
    status, report, page = run("attention-float32")
    assert status == 0
    part = report["parts"]["attention-float32"]
    assert [found["length"] for found in part["results"]] == [17]
    assert {entry["architecture"] for entry in report["preferred"]} == {"ours V1"}
    status, report, page = run("kernels", fails=True)
    assert status == 1
    assert list(report["parts"]) == ["kernels", "attention-float32"]  # the earlier part stays
    found = report["parts"]["kernels"]["found"]
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    lines = page.splitlines()
    assert f"# Measured on {part['machine']['machine']}" in lines
    assert any(line.startswith("| kernels | exit status 1 |") and line.endswith("| 1 | 1 | 1 |") for line in lines)
    assert "test_tiny.test_wrong\n" in page
    assert "| attention/decode | float32 | 1 × 17 | llama, sdpa |" in page
    assert len({line.count("|") for line in lines if line.startswith(("| kernels", "| attention-float32"))}) == 1


def test_part_is_stopped_at_the_limit_and_unknown_parts_are_named(run: Any) -> None:
    status, report, page = run("model", limit=1)
    assert (status, report["parts"]["model"]["exit_status"]) == (1, None)
    assert "| model | stopped at the limit | 1 |" in page
    assert run("nonesuch")[0] == 2
    if not torch.cuda.is_available():
        assert run("model", device="cuda")[0] == 2
