"""What evaluation/RESULTS.md says was measured is what the results beside it say."""

import json
import re
import shlex
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


def test_every_result_and_figure_is_told_and_every_number_in_a_table_is_measured() -> None:
    assert len(COMMANDS) == len(RESULTS) >= 11
    for name, result in RESULTS.items():
        assert f"](../docs/evaluation/{name}.png)" in TEXT
        assert not re.search(r"/(?:tmp|home|root|work)/", json.dumps(result))
        section = TEXT.partition(f"--output results/{name}\n")[2].partition("\n## ")[0]
        table = "\n".join(line for line in section.splitlines() if line.startswith("| ") and re.search(r"\d", line))
        means = [numbers["mean"] for row in result["rows"] for model in row["models"] for numbers in model.values()]
        cells = [str(value) for row in result["rows"] for value in row["cell"].values()]
        for number in re.findall(r"(?<![\w./])(?<!top-)\d[\d,/]*\.?\d*", table):
            plain = number.replace(",", "")
            digits = len(plain.partition(".")[2])
            assert any(f"{mean:.{digits}f}" == plain for mean in means) or plain in cells, (name, number)
