# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The task of tracks B and C: language modelling of books."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from diffllama.evaluation.figures import finish, panels
from diffllama.evaluation.models import model_spec
from diffllama.evaluation.probes import probe_class
from diffllama.evaluation.runs import run as run_probe
from diffllama.training.packing import pack

from .report import draw_bars, draw_means, select
from .text import split_documents, train_tokenizer, write_documents, write_sequences
from .values import Value


BEGINNING = 20_000
"""Characters of each held-out document that may be in the held-out sequences."""


def prepare(settings: Mapping[str, Any], text: str, folder: Path) -> None:
    """Write the tokenizer, the sequences of training documents and of held-out ones, and the held-out documents.

    If the training documents have fewer tokens than a run reads, it reads them several times.
    """
    pretrain = settings["pretrain"]
    length = pretrain["sequence_length"]
    training, held_out = split_documents(text)
    tokenizer = train_tokenizer(training, pretrain["model"]["vocab_size"], [], length)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_sequences(
        folder,
        islice(
            pack(training, tokenizer, length), pretrain["training"]["max_steps"] * pretrain["tokens_per_step"] // length
        ),
        islice(pack((document[:BEGINNING] for document in held_out), tokenizer, length), settings["held_out"]),
    )
    write_documents(folder / "held_out.jsonl", held_out)


def measure(model_folder: Path, settings: Mapping[str, Any], folder: Path) -> list[Value]:
    """Run the probes on the held-out documents."""
    values = []
    for command, options in settings["language"]["probes"].items():
        report = run_probe(
            probe_class(command)(**options),
            [model_spec(str(model_folder), device="cpu")],
            output=model_folder.parent / command,
            data=folder / "held_out.jsonl",
        )
        values += [
            Value(command, row["condition"] | {"metric": metric}, numbers["mean"])
            for row in report.rows
            for metric, numbers in row["models"][0].items()
        ]
    return values


def draw(results: Mapping[str, Any], figure: Figure) -> None:
    """Draw the loss by position, and the losses of tokens that repeat an n-gram and of others."""
    position, slices = panels(figure, 2)
    draw_means(position, results, select(results, "context"), "position")
    position.set_xscale("log", base=2)
    finish(position, "position (tokens)", "average loss up to it (nats per token)")
    draw_bars(slices, results, select(results, "recall", metric="nll"), "slice")
    finish(slices, "slice of the tokens", "loss (nats per token)")
