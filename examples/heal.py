# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a converted model and its Llama further, and draws the losses of both.

The two maps of a converted model stay identical until you train it. Both models read the same tokens in the same order,
with the same seed, optimizer and learning rate.

Usage: python examples/heal.py [CONFIG.yaml] [OUT]

Writes the logs of both to OUT.json, and OUT.png. Run it again to continue an interrupted run.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")

import torch
import transformers
from demo import FOLDER, save_llama, smollm2_gguf
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from diffllama.conversion.engine import convert
from diffllama.training import pretrain
from diffllama.training.pretraining import read_settings


LLAMA = FOLDER.with_name("SmolLM2-135M-Instruct")

CURVES = {
    "loss": "training loss",
    "eval_loss": "loss on held-out text",
    "diff_cosine": "cosine of q1 and q2",
    "diff_lambda": "λ",
    "diff_map_overlap": "overlap of the two maps",
}


def prepare() -> None:
    """Create the demo's two folders, the Llama and its conversion, unless they exist."""
    if not (FOLDER / "model.safetensors").exists():
        convert(smollm2_gguf(), FOLDER, source="llama")
    if not (LLAMA / "model.safetensors").exists():
        save_llama(LLAMA)


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what a run logged: (step, value) for each curve."""
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return {
        name: list(points.items())  # once each, also of a run that was resumed
        for name in CURVES
        if (points := {entry["step"]: entry[name] for entry in history if name in entry})
    }


def draw(results: dict[str, dict[str, list[tuple[int, float]]]], tokens_per_step: int, picture: Path) -> None:
    """Draw both models' losses and the distance between the differential model's maps, over thousands of tokens."""
    figure, (losses, shares, angles) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")

    def plot(axis: Axes, points: list[tuple[int, float]], **style: Any) -> None:
        axis.plot([step * tokens_per_step / 1e3 for step, _ in points], [value for _, value in points], **style)

    for (model, curves), colour in zip(results.items(), ("tab:red", "tab:blue"), strict=True):
        for name, line in (("loss", ":"), ("eval_loss", "-")):
            if name in curves:
                plot(losses, curves[name], label=f"{model}, {CURVES[name]}", color=colour, linestyle=line)
        for name in ("diff_lambda", "diff_map_overlap"):
            if name in curves:
                plot(shares, curves[name], label=CURVES[name])
        if "diff_cosine" in curves:
            distances = [(step, 1 - value) for step, value in curves["diff_cosine"]]
            plot(angles, distances, label="1 - " + CURVES["diff_cosine"])
    angles.set_yscale("log")
    for axis in (losses, shares, angles):
        axis.set_xlabel("thousand tokens")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


def main(config: str = "examples/heal.yaml", out: str = "docs/measurements/heal") -> None:
    """Train both models and write their logs and the figure."""
    settings = read_settings(Path(config))
    if settings["model"].get("from") == str(FOLDER):
        prepare()
    results = {
        name: logged(pretrain(config, of_baseline)) for name, of_baseline in (("DIFF V2", False), ("Llama", True))
    }
    record: dict[str, Any] = {
        "settings": settings,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "results": results,
    }
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(results, settings["tokens_per_step"], Path(f"{out}.png"))
    for name, curves in results.items():
        print(
            name, {curve: [round(value, 4) for _, value in (points[0], points[-1])] for curve, points in curves.items()}
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
