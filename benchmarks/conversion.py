# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of a conversion, compared with a plain copy of the same files. Linux only.

Usage: python -m benchmarks.conversion [--model llama] [--gigabytes 8] [--rounds 3] [--folder DIR] [--json FILE]

The source has random weights, in a temporary folder that is removed at the end. It is a Llama in bfloat16, or, with
`--model motif`, a Motif in float32: with `--gigabytes 10.39` it is as large as Motif-2.6B. The cases:

    copy      `shutil.copytree`
    engine    the conversion's engine with a map that copies every tensor (no real conversion does only that)
    convert   `convert(source=..., verify=False)`, which duplicates a Llama's queries and doubles its output
              projections, and renames a Motif's tensors

The cases run in turn, in rotating order, each in a fresh process. Before each run, dirty pages are written to the disk
and the source is dropped from the page cache. Times start after the imports and include the fsync of the result. A
warm-up round comes first; its results are checked.
"""

import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
import torch
import transformers
import typer
from huggingface_hub import split_torch_state_dict_into_shards
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.machine import machine
from benchmarks.measure import in_turn, resident
from diffllama import DiffLlamaConfig
from diffllama.checkpoints.models import expected_tensors
from diffllama.checkpoints.reading import open_checkpoint
from diffllama.checkpoints.writing import write_shards
from diffllama.conversion import motif
from diffllama.conversion.engine import convert
from diffllama.conversion.weight_map import Rule, plan


def llama(nbytes: float, folder: Path) -> dict[str, torch.Tensor]:
    """Write the configuration of a Llama in bfloat16 of about a given size.

    It is as wide as an 8B model, or half, a quarter, ... as wide if it would have fewer than 4 layers otherwise.

    Args:
        nbytes: size of the weights in bytes.
        folder: folder for config.json.

    Returns:
        Tensors of the model on the meta device, by name.
    """
    for scale in (1, 2, 4, 8, 16, 32):
        hidden, intermediate, vocab = 4096 // scale, 14336 // scale, 32000 // scale
        layers = round((nbytes / 2 - 2 * vocab * hidden) / (2.5 * hidden**2 + 3 * hidden * intermediate))
        if layers >= 4:
            break
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": max(layers, 1)}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False, dtype=torch.bfloat16)
    config.save_pretrained(folder)
    return {name: tensor.to(torch.bfloat16) for name, tensor in expected_tensors(config).items()}


def motif_2(nbytes: float, folder: Path) -> dict[str, torch.Tensor]:
    """Do the same as `llama` for a Motif in float32, as wide as Motif-2.6B or narrower."""
    for scale in (1, 2, 4, 8, 16, 32):
        hidden, intermediate, vocab = 2048 // scale, 8192 // scale, 219520 // scale
        layers = max(1, round((nbytes / 4 - vocab * hidden) / (4 * hidden**2 + 3 * hidden * intermediate)))
        if layers >= 4:
            break
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab, "num_hidden_layers": layers}
    activation = {"hidden_act": "poly_norm", "lambda_init": motif.lambda_init(layers)}
    config = DiffLlamaConfig(**sizes, **activation, num_attention_heads=16, tie_word_embeddings=True, dtype="float32")
    folder.mkdir()
    motif.save_config(config, folder)
    return {name: step.result for name, step in plan(expected_tensors(config), motif.TO_MOTIF, config).items()}


MODELS: dict[str, Callable[[float, Path], dict[str, torch.Tensor]]] = {"llama": llama, "motif": motif_2}


def generate(model: str, nbytes: float, folder: Path) -> list[int]:
    """Write a checkpoint with random weights, one shard at a time, and return the sizes of its tensors in bytes."""
    tensors = MODELS[model](nbytes, folder)
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size="2GB")
    generator = torch.Generator().manual_seed(0)

    def values(name: str) -> torch.Tensor:
        return torch.empty_like(tensors[name], device="cpu").normal_(std=0.02, generator=generator)

    for filename, names in split.filename_to_tensors.items():
        save_file({name: values(name) for name in names}, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": split.tensor_to_filename}))
    return [tensor.nbytes for tensor in tensors.values()]


def copy_tensors(src: Path, dest: Path) -> None:
    """Copy the weights of a folder with the conversion's engine."""
    checkpoint = open_checkpoint(src)
    templates = {re.sub(r"\d+", "{i}", name) for name in checkpoint.tensors}
    dest.mkdir()
    steps = plan(checkpoint.tensors, {template: Rule(template) for template in templates}, DiffLlamaConfig())
    write_shards(dest, steps, checkpoint)


def settings(src: Path) -> dict[str, Any]:
    """Return the fields of a folder's config.json."""
    return json.loads((src / "config.json").read_bytes())


CASES: dict[str, Callable[[Path, Path], object]] = {
    "copy": shutil.copytree,
    "engine": copy_tensors,
    "convert": lambda src, dest: convert(src, dest, source=settings(src)["model_type"].lower(), verify=False),
}


def for_files(folder: Path, call: Callable[[int], object]) -> None:
    """Call a function with the file descriptor of each file in a folder."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            call(file.fileno())


def measure(case: str, src: Path, dest: Path) -> dict[str, float]:
    """Run and measure a case in this process. Its peak memory includes memory-mapped files."""
    os.sync()  # dirty pages would stay in the page cache
    for_files(src, lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
    imports, start = resident("VmHWM") / 1e6, time.perf_counter()
    CASES[case](src, dest)
    returned = time.perf_counter()
    for_files(dest, os.fsync)
    times = {"seconds": time.perf_counter() - start, "seconds_before_fsync": returned - start}
    return times | {"peak_mb": resident("VmHWM") / 1e6, "imports_mb": imports}


def measure_afresh(case: str, src: Path, dest: Path) -> dict[str, float]:
    """Run and measure a case in a fresh process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(measure, case, src, dest).result()


def check(case: str, src: Path, dest: Path) -> None:
    """Check tensors of the first and the last layer of a case's result.

    Raises:
        AssertionError: a tensor has wrong values.
    """
    config, source, result = settings(src), open_checkpoint(src), open_checkpoint(dest)
    changed = case == "convert" and config["model_type"] == "llama"
    for i in (0, config["num_hidden_layers"] - 1):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
            expected, got = (checkpoint.read(f"model.layers.{i}.{name}.weight") for checkpoint in (source, result))
            if changed and "q_proj" in name:
                expected = expected.unflatten(0, (-1, config["head_dim"])).repeat_interleave(2, 0).flatten(0, 1)
            elif changed and "o_proj" in name:
                expected = expected + expected
            torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=f"{case}: {name} of layer {i} is wrong.")


def run(folder: Path, model: str, gigabytes: float, rounds: int, console: Console) -> dict[str, dict[str, Any]]:
    """Check and measure all cases in an empty folder, as the module's docstring says."""
    where = machine("cpu") | {"rounds": rounds, "safetensors": safetensors.__version__}
    generate(model, 3e6, folder / "tiny")
    convert(folder / "tiny", folder / "converted", source=model, verify=True)  # raises if a logit differs
    src, dest = folder / "source", folder / "result"
    sizes = generate(model, gigabytes * 1e9, src)
    where |= {"source MB": sum(sizes) / 1e6, "largest tensor MB": max(sizes) / 1e6}
    for case in CASES:
        console.print(f"checking {case}")
        measure(case, src, dest)
        check(case, src, dest)
        shutil.rmtree(dest)
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for number, case in in_turn(CASES, rounds):
        console.print(f"round {number + 1} of {rounds}: {case}")
        runs[case].append(measure_afresh(case, src, dest))
        shutil.rmtree(dest)
    where["load after"] = os.getloadavg()
    results: dict[str, dict[str, Any]] = {}
    for case, measured in runs.items():
        results[case] = {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        results[case]["peak_mb"] = max(row["peak_mb"] for row in measured)
        results[case]["mb_per_second"] = sum(sizes) / 1e6 / results[case]["seconds"]
        results[case]["speed_ratio"] = results["copy"]["seconds"] / results[case]["seconds"]
        results[case]["runs"] = measured
    return {"machine": where, "results": results}


def main(
    model: Annotated[Literal["llama", "motif"], typer.Option(help="Architecture of the source.")] = "llama",
    gigabytes: Annotated[float, typer.Option(min=1e-3, help="Size of the source in GB.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds, after one warm-up round.")] = 3,
    folder: Annotated[
        Path | None, typer.Option(help="Existing folder for the files. Default: the system's temporary folder.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file for the results.")] = None,
) -> None:
    """Measure time and peak memory of a conversion, compared with a plain copy."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        free, needed = shutil.disk_usage(work).free / 1e9, 3 * gigabytes
        if free < needed:
            sys.exit(f"{work} has {free:.1f} GB free, but {needed:.1f} GB are needed: change --folder or --gigabytes")
        console = Console(width=120)
        report = run(Path(work), model, gigabytes, rounds, console)
    table = Table("case", "s (max - min)", "s before fsync", "MB/s", "speed, × copy", "peak MB", "MB after imports")
    for case, row in report["results"].items():
        times = [measured["seconds"] for measured in row["runs"]]
        cells = [f"{row['seconds']:.2f} ({max(times) - min(times):.2f})", f"{row['seconds_before_fsync']:.2f}"]
        cells += [f"{row['mb_per_second']:.0f}", f"{row['speed_ratio']:.2f}x"]
        table.add_row(case, *cells, f"{row['peak_mb']:.0f}", f"{row['imports_mb']:.0f}")
    console.print(report["machine"], table)
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
