"""Every measured number in the documentation equals that in the JSON file of its command."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.cost import floors
from benchmarks.implementations import configuration, llama
from diffllama import DiffLlamaForCausalLM
from examples.heal import ARMS
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
    """Return the rows of a report's case: implementation -> row."""
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
    """Return requests per second and the ratio to the Llama's, bold if ours misses the target."""
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


def quantized_table() -> Table:
    """Return size, perplexity and speed of each folder, whose name is the model's and that of the recipe."""
    return {
        row["folder"].replace("-", ", "): {
            "weights, MB": f"{row['mb']:.0f}",
            "perplexity": f"{row['perplexity']:.2f}",
            "tokens/s read": f"{row['read_per_second']:,.0f}",
            "tokens/s written": f"{row['written_per_second']:.1f}",
        }
        for row in REPORTS["quantized"]
    }


def healing_table() -> Table:
    """Return accuracy, loss on held-out answers, and how far the maps are apart, of each arm, for each seed."""
    heal = REPORTS["heal"]

    def logged(arm: str, name: str, at: int) -> list[float]:
        values = [[entry[name] for entry in log if name in entry] for log in heal["logs"][arm]]
        return [of_run[at] for of_run in values if of_run]

    def cell(values: list[float], digits: int) -> str:
        return ", ".join(f"{value:.{digits}f}" for value in values) or "–"

    return {
        arm: {
            "accuracy before": cell([heal["accuracy before"][ARMS[arm][0].name]], 2),
            "accuracy": cell(numbers["seeds"], 2),
            "loss before": cell(logged(arm, "eval_loss", 0)[:1], 3),
            "loss": cell(logged(arm, "eval_loss", -1), 3),
            "cosine of q1 and q2": cell(logged(arm, "diff_cosine", -1), 3),
            "λ": cell(logged(arm, "diff_lambda", -1), 3),
        }
        for arm, numbers in heal["accuracy"].items()
    }


TABLES: dict[str, tuple[Path, str, Callable[[], Table]]] = {
    "time": (PERFORMANCE, "time × Llama", time_table),
    "time in the README": (ROOT / "README.md", "time × Llama", readme_table),
    "memory": (PERFORMANCE, "peak memory, MB", memory_table),
    "servers": (PERFORMANCE, "clients", serving_table),
    "conversion": (PERFORMANCE, "case", conversion_table),
    "quantized": (PERFORMANCE, "in vLLM", quantized_table),
    "training a conversion": (ROOT / "docs/fine_tune.md", "trained", healing_table),
}


@pytest.mark.parametrize("name", TABLES)
def test_each_cell_is_the_number_of_its_row_and_column(name: str) -> None:
    page, first_column, measured = TABLES[name]
    (documented,) = tables(page, first_column)
    expected = measured()
    assert documented == expected, f"{page.name} should have:\n{render(first_column, expected)}"


def least_time_of_v2(step: str, length: int) -> float:
    """Return the least number of multiplications of V2, relative to its Llama's.

    A training step needs those of a forward three times, and logits of every token, which a prefill does not compute.
    """
    training = step == "train"
    multiplications = []
    for architecture, attention_floor in (("llama", 1.0), ("v2", floors(step)["v2 blocked"])):
        config = configuration(architecture, llama("small"))
        with torch.device("meta"):
            model = (LlamaForCausalLM if architecture == "llama" else DiffLlamaForCausalLM)(config)
        inner = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
        linear = 3 * (inner + model.lm_head.weight.numel()) if training else inner
        maps = (14 / 4 if training else 1) * attention_floor  # forward and backward; see how_it_works.md
        multiplications.append(linear + maps * config.num_hidden_layers * config.hidden_size * length)
    return multiplications[1] / multiplications[0]


def sentences() -> dict[str, str]:
    """Return measured numbers in prose: text -> name of the page."""

    def ratio(row: str, column: str) -> str:
        return time_cell(record(*(GOALS | OTHERS)[row]), column).strip("*")

    prefill, step = f"{least_time_of_v2('prefill', 2048):.2f}", f"{least_time_of_v2('train', 512):.2f}"
    vllm, transformers = (
        [row[f"{engine}: V2"].partition("(")[2].strip("*)") for row in serving_table().values()]
        for engine in ("vLLM", "`diffllama serve`")
    )
    decoding = [ratio(f"decode one token after {length}", "V1") for length in ("2,048", "8,192")]
    alone = ratio("attention alone, one query after 2,048 keys", "V1")
    trained = ratio("training step of 2 × 512 tokens", "V1")
    (warm_start,) = [row["models"] for row in REPORTS["warm_start"]["rows"] if row["condition"] == {"position": 1024}]
    source_loss, warm_loss = (model["nll"]["mean"] for model in warm_start)
    llama_times = f"{prefill} of the Llama's time for this prefill and {step} for this training step"
    return {
        f"V2 cannot take less than {llama_times}": "README.md",
        f"V2 serves {vllm[0]}, {vllm[1]} and {vllm[2]} of the Llama's requests per second": "README.md",
        f"{transformers[0]}, {transformers[1]} and {transformers[2]} in `diffllama serve`": "README.md",
        f"at least {prefill} times the Llama's time for this prefill and {step} for this": "docs/performance.md",
        f"decodes at {decoding[0]} and {decoding[1]} times the Llama's time (target 1.10)": "docs/performance.md",
        f"trains at {trained}": "docs/performance.md",
        f"takes {alone} times the Llama's": "docs/performance.md",
        f"starts at a loss of {warm_loss:.2f}, averaged over 1,024 tokens": "docs/convert.md",
        f"where the source has {source_loss:.2f}": "docs/convert.md",
    }


def test_numbers_in_sentences_are_measured_or_computed() -> None:
    for sentence, page in sentences().items():
        assert sentence in " ".join((ROOT / page).read_text(encoding="utf-8").split()), (page, sentence)
