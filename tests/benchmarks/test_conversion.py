import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import conversion


@pytest.mark.slow
@pytest.mark.parametrize("model", conversion.MODELS)
def test_benchmark_measures_every_case_and_leaves_nothing_behind(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, report = tmp_path / "folder", tmp_path / "out.json"
    folder.mkdir()
    afresh, measured_afresh = conversion.measure_afresh, []

    def measure(case: str, *folders: Any) -> dict[str, float]:  # in this process: a fresh one would import torch
        measured_afresh.append(case)
        return (afresh if (model, case) == ("llama", "convert") else conversion.measure)(case, *folders)

    monkeypatch.setattr(conversion, "measure_afresh", measure)
    conversion.main(model=model, gigabytes=0.01, rounds=1, folder=folder, json_file=report)
    assert sorted(measured_afresh) == ["convert", "copy", "engine"]
    results = json.loads(report.read_text())["results"]
    assert set(results) == {"copy", "engine", "convert"}
    for row in results.values():
        numbers = [value for name, value in row.items() if name != "runs"]
        assert all(0 < number < math.inf for number in numbers)
        assert row["peak_mb"] >= row["imports_mb"]
    assert results["copy"]["speed_ratio"] == 1.0
    assert not list(folder.iterdir())


def test_benchmark_wants_three_times_the_source_free_on_the_disk(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"3000000000\.0 GB are needed"):
        conversion.main(gigabytes=1e9, folder=tmp_path)
    assert not list(tmp_path.iterdir())
