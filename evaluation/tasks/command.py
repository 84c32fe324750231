# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`diffllama eval`: the command line of the LM Evaluation Harness."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lm_eval._cli import HarnessCLI


TASKS = Path(__file__).parent


def run(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with this package's tasks added to its own and those of `--include_path`."""
    sys.argv = ["lm-eval", *arguments]  # lm-eval parses sys.argv
    command_line = HarnessCLI()
    options = command_line.parse_args()  # shows help and refuses invalid options before the slow imports

    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    setup_logging()
    if hasattr(options, "include_path"):
        config = EvaluatorConfig.load_yaml_config(options.config) if getattr(options, "config", None) else {}
        include_path = options.include_path or config.get("include_path")
        options.include_path = [str(TASKS), *([include_path] if include_path else [])]
    command_line.execute(options)
