# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`transformers serve`, which then knows the model, and refuses requests that it cannot answer."""

import ast
import functools
import signal
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from diffllama.__main__ import leave
from diffllama.checkpoints.extras import needs


MAX_BODY_SIZE = 8 * 2**20
"""Bytes of a request. To read a prompt takes about a hundred times as much memory."""


def command(function: Any) -> Any:
    """A function or class as the command `serve`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    help = "Run transformers' server (transformers serve), which then knows the model. It talks as OpenAI's does."
    app.command("serve", help=help)(function)
    return typer.main.get_command(app)


def check_options(arguments: list[str], parent: Any = None) -> None:
    """Finds what is wrong with arguments of `transformers serve` before it is imported, which takes seconds.

    Its options are read from the source of its class.

    Args:
        parent: context of the command above.

    Raises:
        click.UsageError: an option or its value is wrong.
        typer.Exit: help was asked for, and printed.
        FileNotFoundError: the model is a path, where nothing is.
    """
    (folder,) = find_spec("transformers").submodule_search_locations  # type: ignore[union-attr, misc] # is a package
    tree = ast.parse(Path(folder, "cli", "serve.py").read_bytes())
    tree.body = [  # no import of transformers, and nothing that is computed
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ClassDef) or (isinstance(node, ast.ImportFrom) and node.module == "typing")
    ]
    names: dict[str, Any] = {}
    exec(compile(tree, "transformers/cli/serve.py", "exec"), names)
    context = command(names["Serve"]).make_context("serve", list(arguments), parent=parent)
    model = context.params["force_model"] or ""
    if model.startswith(("/", "./", "../")) and not Path(model.partition(":")[0]).exists():  # folder:file.gguf
        raise FileNotFoundError(f"{model} does not exist. Name a model's folder, or a repository of the Hub.")


def limit_to_context(context: int | None, inputs: Any, generation_config: Any) -> None:
    """Ends an answer where the model's context ends.

    Args:
        context: tokens of a prompt and its answer; `None` is no limit.
        inputs: what a tokenizer made of a prompt; its `input_ids` are a list, or a tensor [1, n].
        generation_config: of this request; its `max_new_tokens` is set.

    Raises:
        fastapi.HTTPException: the prompt is empty or leaves no room for an answer, or no token is asked for. In
            continuous batching, transformers 5.23 gives up all requests, those to come too, after an empty prompt,
            and once its cache is full.
    """
    from fastapi import HTTPException

    ids = inputs["input_ids"]
    length = len(ids) if isinstance(ids, list) else ids.shape[-1]
    if length < 1:
        raise HTTPException(400, "The prompt is empty.")
    wanted = generation_config.max_new_tokens
    if wanted is not None and wanted < 1:
        raise HTTPException(400, f"The number of tokens to generate must be at least 1, got {wanted}.")
    if context is None:
        return
    if length >= context:
        raise HTTPException(400, f"The prompt has {length} tokens, and the model's context {context}: shorten it.")
    room = context - length
    generation_config.max_new_tokens = room if wanted is None else min(wanted, room)


class LimitedToContext:
    """What transformers' managers of generation, one at a time or in continuous batches, do besides."""

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any) -> Any:
        """As theirs, within the model's context."""
        limit_to_context(context_of(model), inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, **options)  # type: ignore[misc]

    def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any) -> Any:
        """As theirs, within the model's context."""
        limit_to_context(context_of(model), inputs, gen_config)
        return super().generate_non_streaming(model, processor, inputs, gen_config, **options)  # type: ignore[misc]


def context_of(model: Any) -> int | None:
    """Tokens of a model's context, or `None`."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


class Pinned:
    """Changes to transformers' manager of models: a pinned server loads no other model, `diff_attention` is known."""

    force_model: str | None
    attn_implementation: str | None

    def _validate_args(self) -> None:
        """Check the server's options. transformers 5.23 has a fixed list of attention functions."""
        name, self.attn_implementation = self.attn_implementation, None
        if name != "diff_attention":
            self.attn_implementation = name
        super()._validate_args()  # type: ignore[misc]
        self.attn_implementation = name

    def process_model_name(self, model_id: str) -> str:
        """As transformers', of the model that the server was started with, if it was started with one."""
        from fastapi import HTTPException

        pinned = self.force_model
        if pinned is not None and model_id not in (pinned, pinned.partition(":")[0]):  # repository:file.gguf
            raise HTTPException(400, f"Server is pinned to '{pinned}'; requested '{model_id}'.")
        return super().process_model_name(model_id)  # type: ignore[misc]


@functools.cache
def adapt_transformers() -> None:
    """Makes the server of transformers (5.6 to 5.23) know our model and the limits above."""
    from starlette.middleware.body_limit import RequestBodyLimitMiddleware
    from transformers.cli.serving import model_manager, server, utils

    from diffllama.modeling_diff.modeling_diffllama import DifferentialLlamaForCausalLM

    # It looks a model's class up in transformers, by the name in config.json, so it serves no code from a folder. (Its
    # own module of that name: transformers puts another one in its place while a model is imported.)
    setattr(model_manager.transformers, DifferentialLlamaForCausalLM.__name__, DifferentialLlamaForCausalLM)
    for name in ("GenerateManager", "CBGenerateManager"):
        setattr(utils, name, type(name, (LimitedToContext, getattr(utils, name)), {}))
    model_manager.ModelManager = type("ModelManager", (Pinned, model_manager.ModelManager), {})
    build_server = server.build_server

    def build_limited_server(*arguments: Any, **options: Any) -> Any:
        app = build_server(*arguments, **options)
        app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY_SIZE)
        return app

    server.build_server = build_limited_server


def run(arguments: list[str]) -> None:
    """Runs `transformers serve` with these arguments, in this process."""
    import transformers  # noqa: F401 # first: while it is imported, another module takes its place

    with needs("serve"):
        for name in ("fastapi", "openai", "starlette.middleware.body_limit", "uvicorn"):
            import_module(name)
    from transformers.cli.serve import Serve

    adapt_transformers()
    # The server's own ends, after it has closed its connections: the command line's would wait for its threads
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, leave)
    with command(Serve).make_context("serve", list(arguments)) as context:
        context.command.invoke(context)
