# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The paper's experiments, a module and a class each."""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from diffllama.evaluation.runs import Probe
    from diffllama.evaluation.settings import Settings


PROBES = {
    "needles": ("Needles", "Retrieve N magic numbers of cities from texts of any length."),
    "attention": ("AttentionToAnswer", "How much attention goes to the answer, and how much to noise."),
    "context": ("Context", "Average loss of the tokens up to a position: what a longer context gives."),
    "recall": ("Recall", "Loss of tokens that the context has shown before, and of others."),
    "icl": ("ManyShot", "Classify with one to thousands of examples in the context."),
    "icl-order": ("ShotOrder", "How far accuracy depends on the order of the examples."),
    "outliers": ("Outliers", "The largest attention logits and hidden states, and their median."),
    "logit-bits": ("LogitBits", "Accuracy with attention logits quantised to 16, 8, 6 and 4 bits."),
    "hallucination": ("Hallucination", "Summaries and answers that a judge finds free of hallucination."),
    "math": ("Math", "Word problems: accuracy, and how long the reasoning is."),
    "gradients": ("Gradients", "Gradient norms of each projection, of a DIFF beside its Transformer."),
    "throughput": ("Throughput", "Tokens per second, forward and backward, of a DIFF beside its Transformer."),
    "scaling": ("Scaling", "Scaling laws of given losses, and how much smaller a DIFF of equal loss is."),
}
"""Command -> class, in the module called like the command, and what it measures."""


def probe_class(command: str) -> "type[Probe[Any]]":
    """The class behind a command of `diffllama probe`."""
    module = importlib.import_module(f"diffllama.evaluation.probes.{command.replace('-', '_')}")
    return getattr(module, PROBES[command][0])


def settings_class(command: str) -> "type[Settings]":
    """The settings of that class, which are there without importing torch."""
    from diffllama.evaluation import settings

    return getattr(settings, f"{PROBES[command][0]}Settings")
