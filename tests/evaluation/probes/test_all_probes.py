"""Every probe measures, writes a report with a figure, and resumes after an interruption."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffllama.evaluation.probes import probe_class
from diffllama.evaluation.runs import Probe
from diffllama.evaluation.settings import PROBES
from support.fake_judge import FakeJudge
from support.probe_runs import run_probe
from support.tiny_loaded_models import KINDS, tiny_loaded_model


SETTINGS: dict[str, dict[str, Any]] = {
    "needles": {"length": [600], "depth": [0.5], "samples_per_condition": 2, "needles": ["1_of_1"]},
    "attention": {"length": 500, "depth": [0.0, 1.0], "samples_per_condition": 1},
    "context": {"length": 100},
    "recall": {"length": 100},
    "icl": {"length": 300, "questions": 4},
    "icl-order": {"length": 300, "questions": 4, "orders": 2},
    "outliers": {"tokens": 96, "length": 32},
    "logit-bits": {"items": 2},
    "hallucination": {"max_tokens": 5, "documents": 2},
    "math": {"problems": 3, "shots": 1, "max_tokens": 5},
    "gradients": {"steps": 2, "batch": 2, "length": 16, "device": "cpu"},
    "throughput": {"length": [8], "rounds": 2, "device": "cpu"},
    "scaling": {},
}
"""Settings of a small run on the built-in sample."""

WATCHING = ("attention", "outliers", "logit-bits")
"""Probes that look into the attention of every kind of model."""


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJudge]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeJudge(lambda body, count: "Conclusion: True") as judge:
        yield judge


def test_settings_are_of_all_probes() -> None:
    assert list(SETTINGS) == list(PROBES)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in SETTINGS for kind in (KINDS if name in WATCHING else ["v1"])]
)
def test_run_is_reported_drawn_and_goes_on(name: str, kind: str, judge: FakeJudge, tmp_path: Path) -> None:
    settings = SETTINGS[name] | ({"judge_url": judge.url} if name == "hallucination" else {})
    probe: Probe[Any] = probe_class(name)(**settings)
    models = [tiny_loaded_model(kind), tiny_loaded_model("llama")] if probe.loads_models else []
    report = run_probe(probe, *models, output=tmp_path, draws=True)
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == report.rows != []
    assert (tmp_path / "figure.png").stat().st_size > 10_000

    file = tmp_path / "samples-1.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], lines[-1]]))  # the header and one sample
    again = run_probe(probe, *models, output=tmp_path)
    assert list(again.outcomes[0]) == list(report.outcomes[0])
    if name != "throughput":  # its times differ
        assert again.rows == report.rows
    if name not in ("logit-bits", "throughput"):  # in other batches log-likelihoods differ by rounding
        assert sorted(file.read_text().splitlines(keepends=True)) == sorted(lines)
