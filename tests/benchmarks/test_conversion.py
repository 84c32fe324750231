import json
import math
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # it imports torch and transformers in four processes
def test_the_benchmark_measures_every_case_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder, report = tmp_path / "folder", tmp_path / "out.json"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.conversion", "--gigabytes", "0.01", "--rounds", "1"]
    subprocess.run([*command, "--folder", folder, "--json", report], check=True, cwd=ROOT)
    results = json.loads(report.read_text())["results"]
    assert set(results) == {"copy", "engine", "convert"}
    for row in results.values():
        numbers = [value for name, value in row.items() if name != "runs"]
        assert all(0 < number < math.inf for number in numbers)
        assert row["peak_mb"] >= row["imports_mb"]
    assert results["copy"]["speed_ratio"] == 1.0
    assert not list(folder.iterdir())


def test_the_benchmark_wants_three_times_the_source_free_on_the_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.conversion", "--gigabytes", "1e9", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "3000000000.0 are needed" in done.stderr
    assert not list(tmp_path.iterdir())
