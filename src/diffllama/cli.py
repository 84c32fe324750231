# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command is a thin front of a function of the package."""

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

import shellingham
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
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)  # README.md:secret: is no emoji


def show_version(value: bool) -> None:
    """Prints the version and leaves."""
    if value:
        print(f"diffllama {__version__}")
        raise typer.Exit


@app.callback()
def diffllama(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[  # read by `main`, which takes it anywhere
        bool, typer.Option("--debug", help="Show the traceback of an error; also after the command.")
    ] = False,
) -> None:
    """Differential attention as a Hugging Face model."""


@contextmanager
def writing(then: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how many bytes of weights are written, by the function that it gives, and then `then`."""
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
"""Arguments of `diffllama.convert` -> the options of its command."""


@contextmanager
def named_as_options() -> Iterator[None]:
    """Calls arguments of `diffllama.convert` by the names of their options in messages."""
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
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to make.")],
    source: Annotated[
        Source | None, typer.Option("--from", metavar="NAME", help="What SRC is, see above; DEST will be ours.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--to", metavar="NAME", help=f"SRC is ours; DEST will be {', '.join(TARGETS)}.")
    ] = None,
    variant: Annotated[Variant | None, typer.Option(help="With --from llama: v2, exact, or v1, a warm start.")] = None,
    gqa_layout: Annotated[
        GqaLayout | None, typer.Option(help="With --from unilm-v1: repeated if trained with multihead_diffattn.py.")
    ] = None,
    noise_heads: Annotated[
        int | None, typer.Option(metavar="N", help="With --from llama: fewer than signal heads, a warm start.")
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a repository.")] = None,
    dtype: Annotated[
        DType, typer.Option(metavar="DTYPE", help="Of the weights: float32, bfloat16, float16, or auto, the source's.")
    ] = "auto",
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="Compare both models' logits. By default if they fit into memory."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DEST if it is a model folder.")] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of weights.")] = "5GB",
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
    --to NAME            the other way

    Folders of ours load anywhere with trust_remote_code=True. DEST appears complete or not at all.
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
        with writing("Weights written; comparing" if verify is not False else "Weights written") as show:
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


License = Annotated[str | None, typer.Option("--license", help="The model's licence, as the Hub calls it: apache-2.0.")]
BaseModel = Annotated[list[str] | None, typer.Option("--base-model", help="What it was fine-tuned from: owner/name.")]
Dataset = Annotated[list[str] | None, typer.Option("--dataset", help="What it was trained on, on the Hub.")]
Language = Annotated[list[str] | None, typer.Option("--language", help="Of its texts: en.")]
Results = Annotated[
    list[Path] | None, typer.Option("--results", help="Result file of lm-eval, or a folder with some. May be repeated.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="FILE:RULE", help="Accept this finding of `check`. May be repeated."),
]


def card_metadata(
    licence: str | None, base_model: list[str] | None, dataset: list[str] | None, language: list[str] | None
) -> dict[str, Any]:
    """The card metadata that the options give; of one base model or language itself, not a list."""
    fields: dict[str, Any] = {"license": licence, "base_model": base_model, "datasets": dataset, "language": language}
    for name in ("base_model", "language"):
        if fields[name] and len(fields[name]) == 1:
            (fields[name],) = fields[name]
    return {name: value for name, value in fields.items() if value}


@app.command()
def export(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder with a diffllama model.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to make.")],
    licence: License = None,
    base_model: BaseModel = None,
    dataset: Dataset = None,
    language: Language = None,
    results: Results = None,
    allow: Allow = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DEST if it is a model folder.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
) -> None:
    """Write a complete Hub folder of a model from save_pretrained, a Trainer, a merged PEFT model or a conversion.

    DEST has the model's code, so that it loads anywhere with trust_remote_code=True, and a card. It appears complete
    and checked, or not at all.
    """
    check_arguments(src, allow or ())
    err.print(f"Reading {src}", markup=False)
    from diffllama.hub_cards.hub_folder import export as run  # takes seconds to import

    findings: list[Finding] = []
    with writing("Weights written") as show:
        folder = run(
            src,
            dest,
            metadata=card_metadata(licence, base_model, dataset, language),
            results=results or (),
            allow=allow or (),
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            progress=show,
            show=findings.extend,
        )
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

    Text that people wrote into the card stays, also in generated sections.
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
    """Check a folder before it is published, without running code in it.

    Every file must be part of a model folder and load; the code must be this package's; the weights must be finite and
    match the configuration; and there must be no pickles, programs, secrets or local paths. Each line begins with
    FILE:RULE, which --allow takes.
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
    """Prints the findings of `check`, one per line."""
    for finding in sorted(findings, key=lambda finding: finding.severity):
        err.print("[red]error[/red] " if finding.severity == "error" else "note  ", end="")
        err.print(str(finding), markup=False)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder written by `export`.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository owner/name; created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; created if it does not exist.")] = None,
    code_only: Annotated[
        bool, typer.Option("--code-only", help="Update the code of a model on the Hub; its weights stay as they are.")
    ] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    replace_card: Annotated[
        bool, typer.Option("--replace-card", help="Discard text that people wrote into the card on the Hub.")
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
        table.add_row("README.md", "its code pinned to these files")
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
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="Model, text and recipe.")],
    of_baseline: Annotated[
        bool, typer.Option("--baseline", help="Train the matched Transformer, on the same tokens.")
    ] = False,
) -> None:
    """Train a language model, from scratch or further, on packed text, by transformers' Trainer.

    Repeated, a training that broke off goes on. On several GPUs: accelerate launch -m diffllama pretrain CONFIG.yaml
    """
    with needs("train"):
        from diffllama.training.settings import read_sections

        read_sections(config)  # most mistakes are found before seconds of imports
        from accelerate import PartialState

        from diffllama.training.pretraining import pretrain as run  # takes seconds to import

    folder = run(config, of_baseline=of_baseline)
    processes = PartialState()
    processes.wait_for_everyone()  # a process that leaves while another needs it dies of an abort, or kills the other
    processes.destroy_process_group()
    if processes.is_main_process:
        err.print(f"Wrote {folder}", markup=False)


@app.command("eval", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evaluate(ctx: typer.Context) -> None:
    """Run the LM Evaluation Harness (lm-eval), which then knows the model and the paper's tasks.

    All arguments are lm-eval's.
    """
    with needs("eval"):
        from diffllama.evaluation.tasks.command import run

    run(ctx.args)


@app.command()
def memory(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="Model folder, config.json, repository owner/name, or preset.")
    ],
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence, prompt and answer.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    dtype: Annotated[DType, typer.Option(help="auto is the configuration's.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repository.")] = None,
) -> None:
    """Tell what memory a model takes when it generates: weights, keys and values, activations.

    Activations are those of all prompts read at once, by any attention but eager. Engines that read prompts in pieces
    take less, and reserve their cache in advance: its room divided by the bytes a token takes is what they can hold.
    """
    from diffllama.memory import memory as run  # takes seconds to import
    from diffllama.memory import read_config

    needed = run(read_config(config, revision), context, batch, dtype)
    rows = {
        "weights": needed.weights,
        f"keys and values of {batch:,} × {context:,} tokens": needed.cache,
        "activations": needed.activations,
        "sum": needed.total,
    }
    table = Table(str(needed.dtype).removeprefix("torch."), Column("GiB", justify="right"), box=None)
    for name, size in rows.items():
        table.add_row(name, f"{size / 2**30:,.3f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{needed.cache_per_token:,} bytes of keys and values a token")


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(ctx: typer.Context) -> None:
    """Run transformers' server (transformers serve), which then knows the model. It talks as OpenAI's does.

    All arguments are those of transformers serve.
    """
    from diffllama.serving import check_options, run

    check_options(ctx.args, ctx.parent)
    run(ctx.args)


app.add_typer(
    probes, name="probe", help="Measure what the paper measured: a table, a JSON file and a figure for each experiment."
)


def main() -> None:
    """Runs the command line: one line for an error (a list if there are several), no traceback, exit status 1.

    `--debug`, before or after the command, shows the traceback. Ctrl-C ends a command with status 130.
    `--install-completion` and `--show-completion` are typer's; a shell's name may follow them.
    """
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    arguments = [word for i, word in enumerate(arguments) if word != "--debug" or i > end]
    if len(arguments) == 2 and arguments[0] in ("--install-completion", "--show-completion"):
        shell = arguments.pop()
        shellingham.detect_shell = lambda: (shell, shell)  # typer takes no name of a shell, it detects it with this

    pid, interrupted = os.getpid(), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if os.getpid() != pid:  # a process that this one has forked, and ends itself
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
        # Whatever a library raises on a broken file is the user's news, not a bug report.
        if interrupted:  # and the library has made another error of it
            sys.exit(130)
        if debug:
            raise
        text = (str(error) if isinstance(error, DiffLlamaError) else " ".join(str(error).split())) or "no message"
        of_configuration = type(error).__module__ == "huggingface_hub.errors"  # a field is wrong, which it names
        if not (isinstance(error, (OSError, ValueError, ImportError)) or of_configuration):
            text += " (run again with --debug to see where it comes from)"
        err.print(f"[red]Error:[/red] {type(error).__name__}: ", end="")
        err.print(text, markup=False)
        sys.exit(1)
