"""Runs of probes on models in memory."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from diffllama.evaluation.models import LoadedModel, ModelSpec
from diffllama.evaluation.runs import Probe, Report, run


def run_probe(
    probe: Probe[Any], *models: LoadedModel, output: Path, data: Path | None = None, draws: bool = False
) -> Report:
    """Run a probe on these models, or on those that it builds itself.

    Figures are not drawn unless `draws` is true: they would take most of the time.
    """
    specs = [ModelSpec(model.name, {"name": model.name}, lambda model=model: model) for model in models]
    with patch.object(type(probe), "draw", type(probe).draw if draws else lambda *_: None):
        return run(probe, specs or probe.specs(), output=output, data=data)
