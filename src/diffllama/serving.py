# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`transformers serve`, which then knows the model."""

import signal
import sys
from importlib import import_module

from diffllama.extras import needs


def run(arguments: list[str]) -> None:
    """Runs `transformers serve` with these arguments, in this process.

    It looks a model's class up in transformers, by the name in config.json, so it serves no code from a folder by
    itself (transformers 5.6 to 5.23).
    """
    import transformers

    with needs("serve"):
        for name in ("fastapi", "openai", "uvicorn"):
            import_module(name)
    from transformers.cli.transformers import main

    from diffllama.modeling_diff.modeling_diffllama import DifferentialLlamaForCausalLM

    setattr(transformers, DifferentialLlamaForCausalLM.__name__, DifferentialLlamaForCausalLM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server's own end; the command line's would wait for its threads
    sys.argv = ["transformers", "serve", *arguments]
    main()
