# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Exports the best V1 model of the study's track `recall` in bfloat16 as a Hub folder.

Usage: python -m examples.export_recall_model [STUDY_FOLDER] [DEST]
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from diffllama.checkpoints.json_files import read_json

from .study.__main__ import make_run
from .study.recall import AS_TRAINED, measure


CARD = """\
## Task

The model finds the value of a key in text: `[ key value]` is hidden in it, and after `[ key` at the end the model
predicts the value. It knows nothing else. It was made to look at trained differential attention maps, and for tests.

It was trained from scratch on {tokens:,} tokens, in sequences of {length} tokens: 19th-century novels with {least} to
{most} needles, and queries. Keys and values are among {words} frequent words. In sequences of other novels, it predicts
{accuracy:.1%} of the values. It is the best of {seeds} models that were trained alike from different seeds.
"""


def main(study: str = "runs/study/recall", dest: str = "examples/recall_model") -> None:
    """Convert the trained model to bfloat16, run `diffllama export`, and describe the task in the card."""
    folder = Path(study)
    results = read_json(folder / "results.json")
    settings = results["settings"]
    rate = results["learning rates"]["V1"]
    runs = [make_run(settings, folder, "V1", seed, rate) for seed in settings["seeds"]]
    run = min(runs, key=lambda run: run.held_out_loss)
    with TemporaryDirectory() as temporary:
        half = Path(temporary) / "recall_model"
        shutil.copytree(run.output, half, ignore=shutil.ignore_patterns("checkpoint-*", "*.safetensors"))
        AutoModelForCausalLM.from_pretrained(run.output, dtype=torch.bfloat16).save_pretrained(half)
        values = measure(half, settings, folder)
        task = settings["recall"]
        card = CARD.format(
            tokens=run.tokens,
            length=settings["pretrain"]["sequence_length"],
            least=min(task["needles"]),
            most=max(task["needles"]),
            words=task["words"],
            seeds=len(runs),
            accuracy=next(v.number for v in values if (v.measure, v.condition) == (AS_TRAINED, {"of": "queries"})),
        )
        words = ["export", half, dest, "--license", "apache-2.0", "--language", "en", "--overwrite"]
        subprocess.run([sys.executable, "-m", "diffllama", *words], check=True)
    readme = Path(dest) / "README.md"
    title = "<!-- /diffllama:title -->\n"
    readme.write_text(readme.read_text(encoding="utf-8").replace(title, f"{title}\n{card}", 1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
