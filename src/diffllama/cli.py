# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command calls one function of the package."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Column, Table
from rich.text import Text

from diffllama import __version__
from diffllama.checkpoints.errors import DiffLlamaError
from diffllama.checkpoints.extras import needs
from diffllama.checkpoints.files import locate
from diffllama.checkpoints.options import DType, Variant, shard_size
from diffllama.conversion.options import TARGETS, GqaLayout, Source, check_conversion
from diffllama.evaluation.commands import probes
from diffllama.hub_cards.findings import check_arguments


if TYPE_CHECKING:
    from diffllama.hub_cards.findings import Finding
    from diffllama.hub_cards.upload import UploadPlan

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)  # `README.md:secret:` contains no emoji


def show_version(value: bool) -> None:
    """Print the version and exit."""
    if value:
        print(f"diffllama {__version__}")
        raise typer.Exit


@app.callback()
def diffllama(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[  # `main` reads it, anywhere on the command line
        bool, typer.Option("--debug", help="Show the traceback of an error. Also accepted after the command.")
    ] = False,
) -> None:
    """Differential attention as a Hugging Face model."""


@contextmanager
def writing(then: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar of the weights that are written, and `then` once all are.

    Yields:
        Function that updates the bar, given the bytes written so far and in total.
    """
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=err) as bar:
        task = bar.add_task("Writing weights", total=None, visible=False)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)
            if done == total:
                bar.update(task, description=then)

        yield show


OPTIONS = {"source": "--from", "target": "--to"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("variant", "gqa_layout", "noise_heads", "revision", "dtype", "max_shard_size")
}
"""Arguments of `diffllama.convert` -> options of the command `convert`."""


@contextmanager
def named_as_options() -> Iterator[None]:
    """Replace arguments of `diffllama.convert` with the command's options in the message of a `ValueError`."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        names = "|".join(OPTIONS)
        text = re.sub(rf"`({names})`", lambda match: OPTIONS[match[1]], str(error))
        text = re.sub(rf"\b({names})='([\w-]+)'", lambda match: f"{OPTIONS[match[1]]} {match[2]}", text)
        raise ValueError(text) from error


@app.command()
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Folder, file, or repository owner/name of the Hub.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to create.")],
    source: Annotated[
        Source | None,
        typer.Option("--from", metavar="NAME", help="Format of SRC, see above. DEST is a diffllama folder."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--to", metavar="NAME", help=f"Format of DEST: {', '.join(TARGETS)}; SRC is a diffllama folder."),
    ] = None,
    variant: Annotated[
        Variant | None, typer.Option(help="With --from llama: v2 (exact, the default) or v1 (a warm start).")
    ] = None,
    gqa_layout: Annotated[
        GqaLayout | None, typer.Option(help="With --from unilm-v1: repeated if trained with multihead_diffattn.py.")
    ] = None,
    noise_heads: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --from llama: number of noise heads. Fewer than signals: a warm start."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of the repository.")
    ] = None,
    dtype: Annotated[
        DType, typer.Option(metavar="DTYPE", help="Dtype of DEST: float32, bfloat16, float16, or auto (that of SRC).")
    ] = "auto",
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="Compare both models' logits. Default: if free memory suffices."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DEST if it is a model folder.")] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of a weight file.")] = "5GB",
) -> None:
    """Convert a checkpoint into a differential model, or a differential model into another format.

    \b
    --from llama         Llama, Mistral, Qwen2, Qwen3, SmolLM3, Phi-3, and GGUF
                         files of these -> V2, logits bit-identical in float32
                         and bfloat16; with --variant v1 -> V1, not exact
    --from motif         Motif-2.6B and Motif-2-12.7B -> V1
    --from perdix        Perdix -> V1
    --from transformers  transformers' own diffllama -> V1
    --from unilm-v1      microsoft/unilm's modules -> V1
    --from unilm-v2      microsoft/unilm's modules -> V2
    --to NAME            diffllama -> another format

    A folder for diffllama also loads without this package, with trust_remote_code=True. DEST is written completely or
    not at all.
    """
    with named_as_options():
        check_conversion(source, target, variant, gqa_layout, noise_heads)
        shard_size(max_shard_size)
        err.print(f"Reading {src}", markup=False)
        if not locate(src, revision, ["config.json"]).exists():
            raise FileNotFoundError(f"{src} does not exist. Name a folder, a file, or a repository of the Hub.")
        from transformers.utils import logging

        from diffllama.conversion.engine import convert as run  # takes seconds to import
        from diffllama.conversion.verification import Verification

        logging.disable_progress_bar()
        with writing("Weights written; comparing logits" if verify is not False else "Weights written") as show:
            folder = run(
                src,
                dest,
                source=source,
                target=target,
                variant=variant,
                gqa_layout=gqa_layout,
                noise_heads=noise_heads,
                revision=revision,
                dtype=dtype,
                verify=verify,
                overwrite=overwrite,
                max_shard_size=max_shard_size,
                progress=show,
            )
    record = json.loads((folder / "conversion.json").read_bytes())["verification"]
    skipped = record.get("skipped")
    err.print(f"Not verified: {skipped}." if skipped else str(Verification.from_dict(record)), markup=False)
    err.print(f"Wrote {folder}", markup=False)


License = Annotated[str | None, typer.Option("--license", help="Licence, as a Hub identifier such as apache-2.0.")]
BaseModel = Annotated[
    list[str] | None,
    typer.Option("--base-model", metavar="REPO", help="Base model on the Hub: owner/name. May be repeated."),
]
Dataset = Annotated[
    list[str] | None,
    typer.Option("--dataset", metavar="REPO", help="Training dataset on the Hub: owner/name. May be repeated."),
]
Language = Annotated[
    list[str] | None, typer.Option("--language", metavar="CODE", help="Language, such as en. May be repeated.")
]
Results = Annotated[
    list[Path] | None,
    typer.Option("--results", metavar="PATH", help="lm-eval result file, or a folder of them. May be repeated."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="FILE:RULE", help="Accept this finding of `check`. May be repeated."),
]


def card_metadata(
    licence: str | None, base_model: list[str] | None, dataset: list[str] | None, language: list[str] | None
) -> dict[str, Any]:
    """Return the card metadata that the options give. A single base model or language is no list."""
    fields: dict[str, Any] = {"license": licence, "base_model": base_model, "datasets": dataset, "language": language}
    for name in ("base_model", "language"):
        if fields[name] and len(fields[name]) == 1:
            (fields[name],) = fields[name]
    return {name: value for name, value in fields.items() if value}


@app.command()
def export(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder with a diffllama model.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to create.")],
    licence: License = None,
    base_model: BaseModel = None,
    dataset: Dataset = None,
    language: Language = None,
    results: Results = None,
    allow: Allow = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DEST if it is a model folder.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a weight file.")] = "5GB",
    space: Annotated[
        bool, typer.Option("--space", help="Write a Hugging Face Space that explores the model; DEST must be new.")
    ] = False,
) -> None:
    """Write a complete Hub folder of a model from save_pretrained, a Trainer, a merged PEFT model or a conversion.

    DEST contains a model card and the model's code, so that it loads without this package, with trust_remote_code=True.
    DEST is written after all checks have passed, completely or not at all.
    """
    if space and overwrite:
        raise ValueError("--space writes a new folder only. Leave --overwrite out, and name another DEST.")
    check_arguments(src, allow or ())
    err.print(f"Reading {src}", markup=False)
    findings: list[Finding] = []
    with writing("Weights written") as progress:
        options: dict[str, Any] = {
            "metadata": card_metadata(licence, base_model, dataset, language),
            "results": results or (),
            "allow": allow or (),
            "max_shard_size": max_shard_size,
            "progress": progress,
            "show": findings.extend,
        }
        if space:
            with needs("explore"):
                from diffllama.explorer.space import write_space

            folder = write_space(src, dest, **options)
        else:
            from diffllama.hub_cards.hub_folder import export as run  # takes seconds to import

            folder = run(src, dest, overwrite=overwrite, **options)
    show_findings(findings)
    err.print(f"Wrote {folder}", markup=False)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with a diffllama model.")],
    licence: License = None,
    base_model: BaseModel = None,
    dataset: Dataset = None,
    language: Language = None,
    results: Results = None,
) -> None:
    """Write or update the card of a model (README.md) from the files in its folder.

    Hand-written text is kept, also in generated sections.
    """
    check_arguments(folder)
    from diffllama.hub_cards.hub_folder import write_card  # takes seconds to import

    metadata = card_metadata(licence, base_model, dataset, language)
    for name in write_card(folder, metadata=metadata, results=results or ()):
        err.print(f"Kept the hand-edited section {name}", markup=False)
    err.print(f"Wrote {folder / 'README.md'}", markup=False)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with a diffllama model.")], allow: Allow = None
) -> None:
    """Check a folder before you publish it, without running code in it.

    Every file must be part of a model folder and load; the code must be this package's; the weights must be finite and
    match the configuration; and there must be no pickles, programs, secrets or local paths. Each finding begins with
    FILE:RULE, the value for --allow.
    """
    check_arguments(folder, allow or ())
    from diffllama.hub_cards.checks import check as run  # takes seconds to import

    findings = run(folder, allow=allow or ())
    show_findings(findings)
    errors = sum(finding.severity == "error" for finding in findings)
    if errors:
        err.print(f"[red]Not ready to be published[/red]: {errors} errors")
        raise typer.Exit(1)
    err.print(f"Ready to be published: {folder}", markup=False)


def show_findings(findings: "list[Finding]") -> None:
    """Print the findings of `check`, one per line."""
    for finding in sorted(findings, key=lambda finding: finding.severity):
        err.print("[red]error[/red] " if finding.severity == "error" else "note  ", end="")
        err.print(str(finding), markup=False)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder written by `export`.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository owner/name; created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; created if it does not exist.")] = None,
    code_only: Annotated[
        bool, typer.Option("--code-only", help="Update the code of a model on the Hub, not its weights.")
    ] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    replace_card: Annotated[
        bool, typer.Option("--replace-card", help="Discard hand-written text of the card on the Hub.")
    ] = False,
    allow: Allow = None,
) -> None:
    """Check a folder and upload it to the Hub. Repeating an interrupted push resumes it."""
    check_arguments(folder, allow or (), repo, revision, create_pr)
    from diffllama.hub_cards.upload import push as run  # takes seconds to import

    def show(plan: "UploadPlan") -> None:
        show_findings(plan.findings)
        table = Table("file", Column("bytes", justify="right"), box=None)
        for name, size in plan.files.items():
            table.add_row(Text(name), f"{size:,}")
        for name in plan.deleted:
            table.add_row(Text(name), "deleted")
        table.add_row("README.md", "pinned to this code")
        err.print(table)
        target = f"{'new ' * plan.creates_repo}{'private' if plan.private else 'public'} repository {plan.repo}"
        err.print(f"Uploading to the {target}" + f", branch {plan.revision}" * bool(plan.revision), markup=False)

    result = run(
        folder,
        repo,
        private=private,
        revision=revision,
        code_only=code_only,
        create_pr=create_pr,
        replace_card=replace_card,
        allow=allow or (),
        show=show,
    )
    err.print(f"{'Uploaded' if result.changed else 'Nothing has changed'}: {result.url}", markup=False)


@app.command()
def pretrain(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="File that names the model, text and recipe.")],
    of_baseline: Annotated[
        bool, typer.Option("--baseline", help="Train the matched Transformer on the same tokens.")
    ] = False,
) -> None:
    """Train a language model on packed text with transformers' Trainer, from scratch or from a checkpoint.

    Repeat the command to resume an interrupted training. On several GPUs: accelerate launch -m diffllama pretrain
    CONFIG.yaml
    """
    with needs("train"):
        from diffllama.training.settings import read_sections

        read_sections(config)  # finds most mistakes before imports that take seconds
        from accelerate import PartialState

        from diffllama.training.pretraining import pretrain as run  # takes seconds to import

    folder = run(config, of_baseline=of_baseline)
    processes = PartialState()
    processes.wait_for_everyone()  # a process that exits while others need it aborts, or makes them abort
    processes.destroy_process_group()
    if processes.is_main_process:
        err.print(f"Wrote {folder}", markup=False)


@app.command()
def explore(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, or repository owner/name of the Hub.")],
    baseline: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model to compare with, such as the matched Llama.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. The default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 7860,
    dtype: Annotated[DType, typer.Option(help="Dtype of weights and computation; auto: the checkpoint's.")] = "auto",
) -> None:
    """Chat with a model and look at its attention maps, in a browser.

    The page needs no network: it loads nothing from elsewhere, and sends nothing there.
    """
    with needs("explore"):
        from diffllama.explorer.run import explore as run  # takes seconds to import

    run(model, baseline, host=host, port=port, dtype=dtype, show=lambda address: err.print(f"Open {address}"))


@app.command("eval", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evaluate(ctx: typer.Context) -> None:
    """Run the LM Evaluation Harness (lm-eval) with support for diffllama models and the paper's tasks.

    All arguments are passed to lm-eval.
    """
    with needs("eval"):
        from diffllama.evaluation.tasks.command import run

    run(ctx.args)


@app.command()
def memory(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="Model folder, config.json, repository owner/name, or preset.")
    ],
    context: Annotated[int, typer.Option(min=1, help="Tokens per sequence, prompt and answer together.")],
    batch: Annotated[int, typer.Option(min=1, help="Batch size in sequences.")] = 1,
    dtype: Annotated[DType, typer.Option(help="Dtype of weights, cache and activations; auto: the model's.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
) -> None:
    """Estimate the memory that a model needs to generate text: weights, KV cache and activations.

    Activations are those of a prefill of all prompts at once, with any attention function but eager. Engines with
    chunked prefill need less. They preallocate the KV cache; its capacity in tokens is its size / the bytes per token.
    """
    from diffllama.memory import memory as run  # takes seconds to import
    from diffllama.memory import read_config

    needed = run(read_config(config, revision), context, batch, dtype)
    rows = {
        "weights": needed.weights,
        f"KV cache of {batch:,} × {context:,} tokens": needed.cache,
        "activations": needed.activations,
        "total": needed.total,
    }
    table = Table(str(needed.dtype).removeprefix("torch."), Column("GiB", justify="right"), box=None)
    for name, size in rows.items():
        table.add_row(name, f"{size / 2**30:,.3f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"KV cache per token: {needed.cache_per_token:,} bytes")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(ctx: typer.Context) -> None:
    """Run transformers' OpenAI-compatible server (transformers serve) with support for diffllama models.

    All arguments are passed to transformers serve.
    """
    from diffllama.serving import check_options, run

    check_options(ctx.args, ctx.parent)
    run(ctx.args)


app.add_typer(
    probes, name="probe", help="Repeat the paper's experiments. Each writes a table, a JSON file and a figure."
)


def main() -> None:
    """Run the command line. An error is one printed line (a list if there are several) and exit status 1.

    `--debug`, before or after the command, shows the traceback. Ctrl-C ends a command with status 130.
    `--install-completion` and `--show-completion` are typer's; a shell's name may follow them.
    """
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    arguments = [word for i, word in enumerate(arguments) if word != "--debug" or i > end]
    if len(arguments) == 2 and arguments[0] in ("--install-completion", "--show-completion"):
        import shellingham

        shell = arguments.pop()
        shellingham.detect_shell = lambda: (shell, shell)  # typer takes no name of a shell, it detects it with this

    pid, interrupted = os.getpid(), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if os.getpid() != pid:  # in a forked child, which must not run the handlers and cleanup of this process
            os._exit(128 + number)
        interrupted = True
        raise KeyboardInterrupt

    def terminate(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)  # end like an error, so that unfinished files are removed

    for name, handler in {"SIGINT": interrupt, "SIGTERM": terminate, "SIGHUP": terminate}.items():
        signal_number = getattr(signal, name, None)
        if signal_number is not None and signal.getsignal(signal_number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(signal_number, handler)
    try:
        app(arguments, prog_name="diffllama")  # also as `python -m diffllama`, which no shell can complete
    except Exception as error:
        # Libraries raise errors of any type on a broken file: the user needs the message, not a traceback.
        if interrupted:  # and a library has turned KeyboardInterrupt into this error
            sys.exit(130)
        if debug:
            raise
        text = (str(error) if isinstance(error, DiffLlamaError) else " ".join(str(error).split())) or "no message"
        of_configuration = type(error).__module__ == "huggingface_hub.errors"  # it names the wrong field
        if not (isinstance(error, (OSError, ValueError, ImportError)) or of_configuration):
            text += " (run again with --debug to see the traceback)"
        err.print(f"[red]Error:[/red] {type(error).__name__}: ", end="")
        err.print(text, markup=False)
        sys.exit(1)
