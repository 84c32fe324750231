# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Load models and serve the explorer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from diffllama.checkpoints.options import DType
from diffllama.evaluation.models import model_spec
from diffllama.explorer.server import serve


def explore(
    model: str,
    baseline: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    dtype: DType = "auto",
    show: Callable[[str], None] = print,
) -> None:
    """Load a model and, if there is one, its baseline, and serve the explorer until interrupted.

    Args:
        model: folder, or repository `owner/name` of the Hub.
        baseline: a model to compare with, such as the matched Llama, or the same model before fine-tuning.
        host: address to listen on.
        port: port to listen on; 0 for a free one.
        dtype: dtype of weights and computation; `auto` is the checkpoint's.
        show: called with the page's address once it can be opened.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: a model cannot be loaded.
        OSError: the address is in use, or not one of this machine.
    """
    specs = [model_spec(name, dtype=dtype) for name in (model, baseline) if name is not None]
    models = [replace(spec.load(), name=Path(spec.name).resolve().name) for spec in specs]
    if len({loaded.name for loaded in models}) < len(models):
        models[1] = replace(models[1], name=f"{models[1].name} (baseline)")
    serve(models, host, port, show)
