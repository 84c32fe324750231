import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import conversion


@pytest.mark.slow
def test_the_benchmark_measures_every_case_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = tmp_path / "folder", tmp_path / "out.json"
    folder.mkdir()
    options = ["--gigabytes", "0.01", "--rounds", "1", "--folder", folder, "--json", report]
    monkeypatch.setattr(sys, "argv", ["conversion", *map(str, options)])
    afresh, measured_afresh = conversion.measure_afresh, []

    def measure(case: str, *folders: Any) -> dict[str, float]:  # one process shows it: each imports torch
        measured_afresh.append(case)
        return (afresh if case == "convert" else conversion.measure)(case, *folders)

    monkeypatch.setattr(conversion, "measure_afresh", measure)
    conversion.main()
    assert sorted(measured_afresh) == ["convert", "copy", "engine"]
    results = json.loads(report.read_text())["results"]
    assert set(results) == {"copy", "engine", "convert"}
    for row in results.values():
        numbers = [value for name, value in row.items() if name != "runs"]
        assert all(0 < number < math.inf for number in numbers)
        assert row["peak_mb"] >= row["imports_mb"]
    assert results["copy"]["speed_ratio"] == 1.0
    assert not list(folder.iterdir())


def test_the_benchmark_wants_three_times_the_source_free_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["conversion", "--gigabytes", "1e9", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        conversion.main()
    assert end.value.code == 2
    assert "3000000000.0 are needed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
