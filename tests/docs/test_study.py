"""The tables of docs/study.md are those that the study makes from its results."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.study.report import tables
from support.markdown import ROOT, parse_tables


PAGE = ROOT / "docs/study.md"
RESULTS = sorted((ROOT / "docs/measurements").glob("study_*.json"))


def tables_of(results: dict[str, Any]) -> list[list[list[str]]]:
    return parse_tables(tables(results))


def test_every_table_with_a_transformer_is_of_some_results() -> None:
    known = [table for file in RESULTS for table in tables_of(json.loads(file.read_text(encoding="utf-8")))]
    shown = [table for table in parse_tables(PAGE.read_text(encoding="utf-8")) if "Transformer" in str(table)]
    assert shown
    for table in shown:
        assert table in known


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_are_shown_with_their_settings(file: Path) -> None:
    results = json.loads(file.read_text(encoding="utf-8"))
    track = file.stem.removeprefix("study_")
    text = PAGE.read_text(encoding="utf-8")
    assert f"measurements/{file.name}" in text
    assert f"TRACKS={track}" in text
    shown = parse_tables(text)
    assert all(table in shown for table in tables_of(results))
    assert len(results["settings"]["seeds"]) >= 3
    for row in results["rows"]:
        for numbers in row["arms"].values():
            assert len(numbers["seeds"]) == len(results["settings"]["seeds"])
