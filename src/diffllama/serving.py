# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` with support for diffllama models. It refuses requests that it cannot answer."""

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
"""Largest request in bytes. Tokenizing a prompt takes about a hundred times as much memory."""


def command(function: Any) -> Any:
    """Make a function or class the command `serve`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    help = "Run transformers' OpenAI-compatible server (transformers serve) with support for diffllama models."
    app.command("serve", help=help)(function)
    return typer.main.get_command(app)


def check_options(arguments: list[str], parent: Any = None) -> None:
    """Check arguments of `transformers serve` without importing it, which takes seconds.

    The options are read from the source of transformers' class `Serve`.

    Args:
        arguments: words after `serve` on the command line.
        parent: context of the parent command.

    Raises:
        click.UsageError: an option or its value is wrong.
        typer.Exit: the arguments ask for the help, which is printed.
        FileNotFoundError: the model is a path that does not exist.
    """
    (folder,) = find_spec("transformers").submodule_search_locations  # type: ignore[union-attr, misc] # is a package
    tree = ast.parse(Path(folder, "cli", "serve.py").read_bytes())
    tree.body = [  # drops imports of transformers, and statements that compute something
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ClassDef) or (isinstance(node, ast.ImportFrom) and node.module == "typing")
    ]
    names: dict[str, Any] = {}
    exec(compile(tree, "transformers/cli/serve.py", "exec"), names)
    context = command(names["Serve"]).make_context("serve", list(arguments), parent=parent)
    model = context.params["force_model"] or ""
    if model.startswith(("/", "./", "../")) and not Path(model.partition(":")[0]).exists():  # folder:file.gguf
        raise FileNotFoundError(f"{model} does not exist. Name a model folder, or a repository of the Hub.")


def limit_to_context(context: int | None, inputs: Any, generation_config: Any) -> None:
    """Limit `max_new_tokens` so that generation stops at the end of the model's context.

    With continuous batching, transformers 5.23 stops serving after an empty prompt, and once its cache is full.

    Args:
        context: maximum number of tokens of a prompt and its answer; `None` for no limit.
        inputs: tokenized prompt, whose `input_ids` are a list or a tensor [1, n].
        generation_config: configuration of this request; its `max_new_tokens` is set.

    Raises:
        fastapi.HTTPException: the prompt is empty or fills the context, or the request asks for no tokens.
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
    remaining = context - length
    generation_config.max_new_tokens = remaining if wanted is None else min(wanted, remaining)


class LimitedToContext:
    """Mixin of transformers' generation managers: limits answers to the model's context."""

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any) -> Any:
        """Generate an answer in pieces, within the model's context."""
        limit_to_context(context_of(model), inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, **options)  # type: ignore[misc]

    def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any) -> Any:
        """Generate a whole answer, within the model's context."""
        limit_to_context(context_of(model), inputs, gen_config)
        return super().generate_non_streaming(model, processor, inputs, gen_config, **options)  # type: ignore[misc]


def context_of(model: Any) -> int | None:
    """Return the context length of a model in tokens, or `None` if the configuration has none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


class Pinned:
    """Mixin of transformers' model manager: one pinned model, and the attention function `diff_attention`."""

    force_model: str | None
    attn_implementation: str | None

    def _validate_args(self) -> None:
        """Check the server's options. transformers 5.23 has a fixed list of attention functions without ours."""
        name = self.attn_implementation
        if name == "diff_attention":
            self.attn_implementation = None
        super()._validate_args()  # type: ignore[misc]
        self.attn_implementation = name

    def process_model_name(self, model_id: str) -> str:
        """Return transformers' name of a requested model.

        Raises:
            fastapi.HTTPException: the server was started with another model.
        """
        from fastapi import HTTPException

        pinned = self.force_model
        if pinned is not None and model_id not in (pinned, pinned.partition(":")[0]):  # repository:file.gguf
            raise HTTPException(400, f"Server is pinned to '{pinned}'; requested '{model_id}'.")
        return super().process_model_name(model_id)  # type: ignore[misc]


@functools.cache
def adapt_transformers() -> None:
    """Add the model class and the limits above to transformers' server (5.6 to 5.23)."""
    from starlette.middleware.body_limit import RequestBodyLimitMiddleware
    from transformers.cli.serving import model_manager, server, utils

    from diffllama.modeling_diff.modeling_diffllama import DifferentialLlamaForCausalLM

    # The server looks up the model's class in transformers, by the name in config.json: it runs no code of a folder.
    # The class is set on the server's own reference, since transformers replaces its module while a model is imported.
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
    """Run `transformers serve` in this process.

    Args:
        arguments: words after `serve` on the command line.

    Raises:
        ModuleNotFoundError: the extra `serve` is not installed.
    """
    import transformers  # noqa: F401 # before its submodules: transformers replaces its module while it is imported

    with needs("serve"):
        for name in ("fastapi", "openai", "starlette.middleware.body_limit", "uvicorn"):
            import_module(name)
    from transformers.cli.serve import Serve

    adapt_transformers()
    # uvicorn closes its connections and then raises the signal again. The command line's handlers would wait for the
    # server's threads then.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, leave)
    with command(Serve).make_context("serve", list(arguments)) as context:
        context.command.invoke(context)
