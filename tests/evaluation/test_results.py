"""What evaluation/RESULTS.md says was measured is what the results beside it say."""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diffllama.evaluation.commands import as_command, command
from diffllama.evaluation.probes import probe_class


ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "evaluation/RESULTS.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^diffllama probe (.*)$", TEXT, re.MULTILINE)
RESULTS = {file.stem: json.loads(file.read_text()) for file in (ROOT / "docs/evaluation").glob("*.json")}


def options(words: list[str]) -> dict[str, Any]:
    """What the options of a command come to, defaults included."""
    name, *arguments = words
    made = as_command(name, command(name))
    return made.make_context(name, arguments).params


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_the_settings_of_its_result(line: str) -> None:
    words = shlex.split(line)
    given, result = options(words), RESULTS[Path(words[words.index("--output") + 1]).name]
    kind = probe_class(words[0])
    assert result["probe"] == words[0]
    assert result["paper"] == kind.paper
    assert {name: given[name] for name in result["settings"]} == result["settings"]
    if given.get("compare"):
        assert [Path(model["name"]).name for model in result["models"]] == ["llama", "diff"]


LABELS = {
    "", "needles", "arrangement", "bits", "demonstrations", "depth", "length", "pass", "position", "problems", "slice",
    "step",
}  # fmt: skip
"""Headers of columns that say what a row is about."""

METRICS = {
    "sums": "acc", "sums divided by characters": "acc_norm", "with a stated answer": "stated", "NLL": "nll",
    "tokens of reasoning": "tokens", "margin by chance": "chance", "ratio": "ratio",
}  # fmt: skip
"""Headers of columns -> metrics, where they differ."""


def tables(text: str) -> Iterator[tuple[dict[str, str], str, str]]:
    """What each condition of a section's tables says: the row's labels, the column's header, and the number."""
    lines = [[part.strip() for part in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| ")]
    header: list[str] = []
    for before, line in pairwise([[], *lines]):
        if set("".join(line)) <= {"-"}:
            header = before
        elif header:
            row = dict(zip(header, line, strict=True))
            labels = {name: row.pop(name) for name in header if name in LABELS}
            yield from ((labels, column, text) for column, text in row.items())


def measured(probe: str, row: dict[str, str], column: str) -> tuple[dict[str, Any], str]:
    """The condition and the metric of a probe's results that a condition of its table is of."""
    metric = METRICS.get(column, column)
    match probe:
        case "needles":
            length = int(column.removesuffix(" tokens").replace(",", ""))
            return {"needles": row["needles"], "length": length, "depth": "all"}, "accuracy"
        case "attention":
            return {"depth": float(row["depth"]), "shares": "signed"}, metric
        case "context":
            return {"position": int(column)}, "nll"
        case "icl":
            return {"shots": int(column)}, "accuracy"
        case "outliers":
            return {"activation": row[""].partition(",")[0]}, metric
        case "logit-bits":
            return {"bits": int(row["bits"])}, metric
        case "gradients":
            return {"gradient of": row[""], "step": int(row["step"])}, MODELS[column]
        case "throughput":
            speed = f"{MODELS[column]}_tokens_per_second" if column in MODELS else metric
            return {"pass": row["pass"], "length": int(row["length"].replace(",", ""))}, speed
    return row, metric


MODELS = {"Transformer": "transformer", "DIFF V1": "diff"}


@pytest.mark.parametrize("name", RESULTS)
def test_every_number_of_a_table_is_the_one_that_was_measured_there(name: str) -> None:
    result = RESULTS[name]
    section = TEXT.partition(f"--output results/{name}\n")[2].partition("\n## ")[0]
    told = list(tables(section))
    assert len(told) >= 4
    for labels, column, text in told:
        condition, metric = measured(result["probe"], labels, column)
        (row,) = [row for row in result["rows"] if condition.items() <= row["condition"].items()]
        only = {"Llama": row["models"][:1], "DIFF": row["models"][1:]}.get(labels.get("", "").rpartition(", ")[2])
        for model in only or row["models"]:
            digits = len(text.partition(".")[2])
            assert text == (f"{model[metric]['mean']:,.{digits}f}" if metric in model else ""), (labels, column)


def test_every_result_and_figure_is_told_and_tells_nothing_of_the_machine() -> None:
    assert len(COMMANDS) == len(RESULTS) >= 11
    for name, result in RESULTS.items():
        assert f"](../docs/evaluation/{name}.png)" in TEXT
        assert not re.search(r"/(?:tmp|home|root|work)/", json.dumps(result))
