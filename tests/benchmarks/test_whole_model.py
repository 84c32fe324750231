import json
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow


def test_the_benchmark_times_every_model_in_every_case(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.whole_model", "--context", "32", "--rounds", "1", "--json"]
    subprocess.run([*command, tmp_path / "out.json"], check=True, cwd=Path(__file__).parents[2])
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert set(results) == {"decode", "prefill", "train"}
    for case in results.values():
        assert set(case) == {"llama", "transformers diffllama", "ours V1", "ours V2"}
        assert case["llama"]["ratio"] == 1.0
        assert all(row["median_ms"] > 0 for row in case.values())
