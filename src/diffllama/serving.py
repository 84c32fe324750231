# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`transformers serve`, which then knows the model."""

import signal
import sys
from importlib import import_module
from typing import Any

from diffllama.extras import needs
from diffllama.modeling_diff.modeling_diffllama import DifferentialLlamaForCausalLM


class ServedModel(DifferentialLlamaForCausalLM):
    """The model as a server has it: continuous batching refuses prompts that leave no room in the model's context.

    Transformers 5.23 takes them, and gives up all requests, those to come too, once its cache is full.
    """

    def init_continuous_batching(self, *args: Any, **options: Any) -> Any:
        """As transformers', with the model's context as a bound of prompts and answers."""
        manager = super().init_continuous_batching(*args, **options)
        add_request, context = manager.add_request, self.config.max_position_embeddings

        def add_bounded_request(input_ids: list[int], *, max_new_tokens: int, **others: Any) -> str | None:
            from fastapi import HTTPException

            room = context - len(input_ids)
            if room < 1:
                raise HTTPException(
                    400, f"The prompt has {len(input_ids)} tokens, and the model's context {context}: shorten it."
                )
            return add_request(input_ids, max_new_tokens=min(max_new_tokens, room), **others)

        manager.add_request = add_bounded_request
        return manager


def run(arguments: list[str]) -> None:
    """Runs `transformers serve` with these arguments, in this process.

    It looks a model's class up in transformers, by the name in config.json, so it serves no code from a folder by
    itself (transformers 5.6 to 5.23).
    """
    import transformers  # not above: while it is imported first, another module takes its place

    with needs("serve"):
        for name in ("fastapi", "openai", "uvicorn"):
            import_module(name)
    from transformers.cli.transformers import main

    setattr(transformers, DifferentialLlamaForCausalLM.__name__, ServedModel)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server's own end; the command line's would wait for its threads
    sys.argv = ["transformers", "serve", *arguments]
    main()
