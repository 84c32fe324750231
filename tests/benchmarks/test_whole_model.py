import json
import sys
from pathlib import Path

import pytest

from benchmarks import whole_model


def test_the_benchmark_times_every_model_in_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--width", "128", "--layers", "1", "--context", "32", "--rounds", "1", "--json", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", ["whole_model", *map(str, options)])
    whole_model.main()
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["machine"]["context"], report["machine"]["rounds"]) == (32, 1)
    assert set(report["results"]) == {"decode", "prefill", "train"}
    for case in report["results"].values():
        assert set(case) == {"llama", "transformers diffllama", "ours V1", "ours V2"}
        assert case["llama"]["ratio"] == 1.0
        assert all(row["median_ms"] > 0 for row in case.values())
