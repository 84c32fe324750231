"""Every measured number in the documentation is the one that its command wrote to docs/measurements/."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from support.markdown import ROOT, render, tables


Table = dict[str, dict[str, str]]

PERFORMANCE = ROOT / "docs/performance.md"
MEASUREMENTS = ROOT / "docs/measurements"
REPORTS = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in MEASUREMENTS.glob("*.json")}

PREFILL, DECODE_2K, DECODE_8K, TRAIN = GOALS = {
    "prefill 2,048 tokens": ("models", "model/prefill", 2048),
    "decode one token after 2,048": ("models", "model/decode", 2048),
    "decode one token after 8,192": ("models", "model/decode", 8192),
    "training step of 2 × 512 tokens": ("models", "model/train", 512),
}
"""Row -> report, case and length. These have targets."""

OTHERS = {
    "attention alone, forward, 2,048 tokens": ("attention", "attention/prefill", 2048),
    "attention alone, forward and backward, 2,048 tokens": ("attention", "attention/train", 2048),
    "attention alone, one query after 2,048 keys": ("attention", "attention/decode", 2048),
    "generate 64 tokens after 512, dynamic KV cache": ("generate", "generate/dynamic", 512),
    "generate 64 tokens after 512, static KV cache": ("generate", "generate/static", 512),
    "generate 64 tokens, continuous batching of 4": ("generate", "generate/continuous", 512),
    "SmolLM2-135M, prefill 512 tokens": ("smollm2", "model/prefill", 512),
    "SmolLM2-135M, decode one token after 512": ("smollm2", "model/decode", 512),
}

IMPLEMENTATIONS = {
    "Llama": "llama, sdpa",
    "transformers": "transformers diffllama, sdpa",
    "V1": "ours V1, diff_attention",
    "V1, `sdpa`": "ours V1, sdpa",
    "V2": "ours V2, sdpa",
    "V2, `diff_attention`": "ours V2, diff_attention",
    "Llama 4:1": "llama 4:1, sdpa",
    "V2 4:1": "ours V2 4:1, sdpa",
    "V2 4:1, `diff_attention`": "ours V2 4:1, diff_attention",
}
"""Column -> implementation in a report."""


SERVERS = {"llama": "Llama", "llama, Transformers backend": "Llama, Transformers backend", "diff": "V2"}
"""Server in a report -> how its column ends."""


def record(report: str, case: str, length: int) -> dict[str, Any]:
    """Return what a report has of a case: implementation -> row."""
    (found,) = [each for each in REPORTS[report]["results"] if (each["case"], each["length"]) == (case, length)]
    assert not found["refused"]
    return found["implementations"]


def time_cell(rows: dict[str, Any], column: str) -> str:
    """Return milliseconds of a Llama or the ratio of another implementation, bold if it misses its target."""
    if column == "target":
        limits = {row["goal"]["at_most"] for row in rows.values() if "goal" in row} - {None}
        return f"{limits.pop():.2f}" if limits else ""
    row = rows.get(IMPLEMENTATIONS[column.removesuffix(", ms")])
    if row is None:
        return ""
    if column.endswith(", ms"):
        return f"{row['milliseconds']['median']:,.{0 if row['milliseconds']['median'] >= 100 else 1}f}"
    ratio = f"{row['ratio']['median']:.2f}"
    return f"**{ratio}**" if (row.get("goal") or {}).get("at_most") and not row["goal"]["met"] else ratio


def time(rows: dict[str, tuple[str, str, int]], columns: tuple[str, ...]) -> Table:
    return {label: {column: time_cell(record(*key), column) for column in columns} for label, key in rows.items()}


def time_table() -> Table:
    ours = ("V1", "V1, `sdpa`", "V2", "V2, `diff_attention`")
    grouped = ("V2 4:1", "V2 4:1, `diff_attention`")
    return time(GOALS | OTHERS, ("Llama, ms", "transformers", *ours, "Llama 4:1, ms", *grouped, "target"))


def readme_table() -> Table:
    return time(GOALS, ("Llama, ms", "transformers", "V1", "V2", "Llama 4:1, ms", "V2 4:1", "target"))


def memory_table() -> Table:
    columns = ("Llama", "transformers", "V1", "V2", "Llama 4:1", "V2 4:1")
    return {
        label: {column: f"{record(*key)[IMPLEMENTATIONS[column]]['step_mb']:,.0f}" for column in columns}
        for label, key in GOALS.items()
    }


def serving_table() -> Table:
    """Return requests per second, beside a Llama's with the ratio, bold if ours misses the target."""
    table: Table = {}
    for report, engine in {"serving_vllm": "vLLM", "serving_transformers": "`diffllama serve`"}.items():
        for row in REPORTS[report]["results"]:
            ratio = median(row["ratios"])
            shown = f"**{ratio:.2f}**" if row["server"] == "diff" and ratio < 0.9 else f"{ratio:.2f}"
            rate = f"{median(load['requests_per_second'] for load in row['rounds']):.2f}"
            cell = rate if row["server"] == "llama" else f"{rate} ({shown})"
            table.setdefault(str(row["clients"]), {})[f"{engine}: {SERVERS[row['server']]}"] = cell
    return table


def conversion_table() -> Table:
    return {
        case: {
            "seconds": f"{row['seconds']:.1f}",
            "of the copy's time": f"{1 / row['speed_ratio']:.2f}",
            "peak, MB": f"{row['peak_mb']:,.0f}",
        }
        for case, row in REPORTS["conversion"]["results"].items()
    }


TABLES: dict[str, tuple[Path, str, Callable[[], Table]]] = {
    "time": (PERFORMANCE, "time × Llama", time_table),
    "time in the README": (ROOT / "README.md", "time × Llama", readme_table),
    "memory": (PERFORMANCE, "peak memory, MB", memory_table),
    "servers": (PERFORMANCE, "clients", serving_table),
    "conversion": (PERFORMANCE, "case", conversion_table),
}


@pytest.mark.parametrize("name", TABLES)
def test_each_cell_is_the_number_of_its_row_and_column(name: str) -> None:
    page, first_column, measured = TABLES[name]
    (documented,) = tables(page, first_column)
    expected = measured()
    assert documented == expected, f"{page.name} should have:\n{render(first_column, expected)}"
