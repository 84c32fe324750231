"""The numbers in docs/evaluate.md are those of the reports, and its commands have valid options."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from diffllama.evaluation.commands import probes
from diffllama.evaluation.settings import PROBES
from support.markdown import parse_tables


ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/evaluate.md").read_text(encoding="utf-8")
MEASURED = TEXT.partition("\n## Measured")[2]
COMMANDS = re.findall(r"diffllama probe ([^`\n]+)", MEASURED)


METRICS = {
    "gradients": {"Transformer": "transformer", "DIFF V1": "diff"},
    "throughput": {
        "Transformer": "transformer_tokens_per_second", "DIFF V1": "diff_tokens_per_second", "ratio": "ratio",
    },
}  # fmt: skip
"""Report -> columns of its table with numbers -> their metrics. The other columns name the row's condition."""

REPORTS = {name: json.loads((ROOT / f"docs/measurements/{name}.json").read_text()) for name in METRICS}


def options(line: str) -> dict[str, Any]:
    """Return the options of a probe's command, including defaults."""
    name, *arguments = shlex.split(line)
    return get_command(probes).commands[name].make_context(name, arguments).params


def table(name: str, text: str = TEXT) -> list[tuple[list[str], dict[str, str]]]:
    """Return the rows of a report's table: labels, and numbers by column."""
    header, *rows = parse_tables(text.partition(f"probe {name} --output")[2])[0]
    numbers = METRICS[name]
    labels = len(header) - len(numbers)
    assert header[labels:] == list(numbers)
    return [(row[:labels], dict(zip(numbers, row[labels:], strict=True))) for row in rows]


def differences(name: str, text: str = TEXT) -> list[str]:
    """Return the numbers of a table that differ from the report's for their condition and metric."""
    wrong = []
    for labels, numbers in table(name, text):
        condition = [int(label.replace(",", "")) if label[0].isdigit() else label for label in labels]
        (row,) = [
            row
            for row in REPORTS[name]["rows"]
            if sorted(map(str, row["condition"].values())) == sorted(map(str, condition))
        ]
        for column, number in numbers.items():
            mean = row["models"][0][METRICS[name][column]]["mean"]
            if number != f"{mean:,.{len(number.partition('.')[2])}f}":
                wrong.append(number)
    return wrong


@pytest.mark.parametrize("line", COMMANDS)
def test_command_with_todays_options_is_accepted(line: str) -> None:
    assert options(line)["seed"] == 0


def test_commands_are_of_every_probe_that_was_measured() -> None:
    assert {line.split()[0] for line in COMMANDS} == METRICS.keys()


@pytest.mark.parametrize("name", METRICS)
def test_report_is_of_the_command_beside_it(name: str) -> None:
    report, (line,) = REPORTS[name], [line for line in COMMANDS if line.split()[0] == name]
    settings = options(line)
    assert (report["probe"], report["paper"]) == (name, PROBES[name].paper)
    assert {option: settings[option] for option in report["settings"]} == report["settings"]
    assert not re.search(r"/(?:tmp|home|root|work)/", json.dumps(report))
    for suffix in ("json", "png"):
        assert f"(measurements/{name}.{suffix})" in TEXT


@pytest.mark.parametrize("name", METRICS)
def test_table_has_the_numbers_of_its_report(name: str) -> None:
    assert len(table(name)) >= 4
    assert differences(name) == []


@pytest.mark.parametrize("name", METRICS)
def test_number_of_another_condition_or_metric_is_noticed(name: str) -> None:
    (_, first), (_, second), *_ = table(name)
    for right, wrong in ((first, second["Transformer"]), (first, first["DIFF V1"])):
        assert differences(name, TEXT.replace(f"| {right['Transformer']} |", f"| {wrong} |")) == [wrong]
