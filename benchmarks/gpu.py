# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu`: all that only a GPU can tell, in parts, and which attention function to prefer there."""

import json
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

import torch
import typer
from rich.console import Console

from benchmarks.goals import describe
from benchmarks.implementations import DIFFERENTIAL, NAMES
from diffllama.checkpoints.files import replace_file


ROOT = Path(__file__).parents[1]
TESTS = {"kernels": ["tests/kernels"], "flash-attention": ["tests/modeling_diff"]}
OTHERS = "other-tests"
RUNS = {
    "attention-bfloat16": ["attention", "--dtype", "bfloat16"],
    "model": ["model/prefill", "model/decode", "model/train"],
    "attention-float32": ["attention", "--dtype", "float32"],
    "continuous-batching": ["generate/continuous"],
}
LENGTHS = {"attention-bfloat16": [512, 4096, 32768], "attention-float32": [512, 4096]}
PARTS = (*TESTS, *RUNS, OTHERS)
"""In the order of their worth: tests of kernels and of flash attention, times, and what other tests need a GPU."""

CASES = ("attention/prefill", "attention/train", "attention/decode")


def pytest_words(part: str, file: Path) -> list[str]:
    """Return the command of a part of tests, which writes its results as JUnit's XML."""
    places = TESTS.get(part) or ["tests", *(f"--ignore={place}" for places in TESTS.values() for place in places)]
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junit-xml={file}", *places]


def run_words(part: str, file: Path, options: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Return the command of a part of benchmarks, which writes its results as JSON after each case."""
    sizes = [word for length in lengths or LENGTHS.get(part, ()) for word in ("--length", str(length))]
    return [sys.executable, "-m", "benchmarks", "run", *RUNS[part], *options, *sizes, "--json", str(file)]


def read_tests(file: Path) -> dict[str, Any]:
    """Read how many tests passed, failed and were skipped, and the names of those that failed."""
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None
    tests, failures, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    bad = failures + errors
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"passed": tests - bad - skipped, "failed": bad, "skipped": skipped, "names_of_failed": failed}


def run_part(folder: Path, part: str, options: Sequence[str], lengths: Sequence[int], limit: float) -> dict[str, Any]:
    """Run a part in a process of its own, for `limit` seconds at most, and return what it found until then."""
    file = folder / f"{part}.{'json' if part in RUNS else 'xml'}"
    file.unlink(missing_ok=True)
    words = run_words(part, file, options, lengths) if part in RUNS else pytest_words(part, file)
    begun = time.monotonic()
    with (folder / f"{part}.log").open("w") as log:
        try:
            status: int | None = subprocess.run(
                words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    command = shlex.join(["python", *words[1:]])
    record: dict[str, Any] = {"command": command, "seconds": time.monotonic() - begun, "exit_status": status}
    if not file.is_file():
        return record
    return record | (json.loads(file.read_text()) if part in RUNS else {"found": read_tests(file)})


def preferred(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tell which attention function is the fastest for each of our architectures, dtype, and length.

    Args:
        results: entries of `--json` of the cases in `CASES`.

    Returns:
        An entry per architecture, dtype and length: the fastest function of each case, and `default`, which has the
        lowest geometric mean of ratios to the Llama over all cases in which every function was timed.
    """
    ratios: dict[tuple[Any, ...], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        for name, row in result["implementations"].items():
            architecture, function = name.split(", ")
            if result["case"] in CASES and architecture in {NAMES[ours] for ours in DIFFERENTIAL}:
                key = architecture, result["dtype"], result["length"]
                ratios[key][function][result["case"]] = row["ratio"]["median"]
    entries = []
    for (architecture, dtype, length), by_function in ratios.items():
        entry: dict[str, Any] = {"architecture": architecture, "dtype": dtype, "length": length}
        for case in CASES:
            timed = {function: row[case] for function, row in by_function.items() if case in row}
            entry[case] = min(timed, key=timed.__getitem__) if timed else None
        means = {
            function: prod(row.values()) ** (1 / len(row))
            for function, row in by_function.items()
            if len(row) == len(CASES)
        }
        entries.append(entry | {"default": min(means, key=means.__getitem__) if means else None})
    return entries


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    longest = len(header)
    cells = [[*("–" if cell is None else str(cell) for cell in line), *["–"] * (longest - len(line))] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def as_markdown(parts: dict[str, dict[str, Any]]) -> str:
    """Format what all parts found."""
    results = [result for part in parts.values() for result in part.get("results", ())]
    machines = {part["machine"]["machine"] for part in parts.values() if "machine" in part}
    ends = {None: "stopped at the limit", 0: "done"}
    ran, timed = [], []
    for name, part in parts.items():
        end = ends.get(part["exit_status"], f"exit status {part['exit_status']}")
        ran.append((name, end, round(part["seconds"]), *part.get("found", {}).values())[:6])
    for result in results:
        sizes = result["case"], result["dtype"], f"{result['batch']} × {result['length']:,}"
        for name, row in result["implementations"].items():
            times = f"{row['milliseconds']['median']:.4g}", f"{row['ratio']['median']:.2f}"
            peak = None if row["step_mb"] is None else f"{row['step_mb']:,.1f}"
            timed.append((*sizes, name, *times, peak, describe(row["goal"]) if "goal" in row else ""))
    sections = [
        f"# Measured on {', '.join(sorted(machines)) or 'no device'}",
        table(("part", "end", "seconds", "tests passed", "failed", "skipped"), ran),
        "## Attention function to prefer",
        table(
            ("architecture", "dtype", "tokens", *CASES, "default"),
            [list(entry.values()) for entry in preferred(results)],
        ),
        "## Times",
        table(("case", "dtype", "batch × tokens", "implementation", "ms", "× llama", "peak memory, MB", "goal"), timed),
    ]
    failed = [f"* {name}" for part in parts.values() for name in part.get("found", {}).get("names_of_failed", ())]
    refused = [
        f"* {result['case']}, {result['dtype']}, {result['length']:,} tokens: {name}: {why}"
        for result in results
        for name, why in result["refused"].items()
    ]
    for title, lines in (("## Failed tests", failed), ("## Refused", refused)):
        sections += [title, "\n".join(lines)] if lines else []
    return "\n\n".join(sections) + "\n"


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for gpu.json, gpu.md, and each part's results and log.")],
    part: Annotated[list[str] | None, typer.Option(help=f"Part to run: {', '.join(PARTS)}. Default: all.")] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which a part is stopped.")] = 600,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of the benchmarks.")] = "cuda",
    shape: Annotated[str, typer.Option(help="Model size, see `python -m benchmarks run --help`.")] = "3b",
    length: Annotated[list[int] | None, typer.Option(min=1, help="Sequence length in tokens.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 5,
) -> None:
    """Run the parts, and tell what all parts found that have run in this folder. A part replaces its earlier results.

    Exits with status 1 if a part did not end well.
    """
    for name in part or ():
        if name not in PARTS:
            raise typer.BadParameter(f"unknown part {name!r}; known: {', '.join(PARTS)}.", param_hint="--part")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch finds no CUDA device; try the commands with `--device cpu --shape tiny`.")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "gpu.json"
    parts: dict[str, dict[str, Any]] = json.loads(report.read_text())["parts"] if report.is_file() else {}
    options = ["--device", device, "--shape", shape, "--rounds", str(rounds)]
    console = Console(stderr=True)
    for name in part or PARTS:
        console.print(f"{name}: at most {limit:.0f} s, log in {folder / name}.log", style="dim", highlight=False)
        parts[name] = run_part(folder, name, options, length or (), limit)
        parts = {name: parts[name] for name in PARTS if name in parts}
        found = [result for entry in parts.values() for result in entry.get("results", ())]
        replace_file(report, json.dumps({"parts": parts, "preferred": preferred(found)}, indent=2) + "\n")
        replace_file(folder / "gpu.md", as_markdown(parts))
    console.print(f"Wrote {report} and {folder / 'gpu.md'}", highlight=False)
    if any(parts[name]["exit_status"] != 0 for name in part or PARTS):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
