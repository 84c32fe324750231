import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import shellingham
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import diffllama
from diffllama import DiffLlamaForCausalLM, __main__
from diffllama.checkpoints.errors import CheckpointError, VerificationError
from diffllama.cli import app, main
from diffllama.hub_cards.findings import Finding, FolderError
from diffllama.hub_cards.upload import UploadPlan, UploadResult
from support.llama_checkpoints import REFUSALS, Refusal, llama, prepared, snapshot
from support.tiny_models import tiny_model


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run the command as the shell would, in this process. Returns its exit status and stderr."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["diffllama", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return end.value.code or 0, err


def error_of(err: str) -> str:
    """Check that stderr ends in one error, which has a line, or several if it lists faults. Returns it."""
    lines = [line for line in err.splitlines() if line.strip()]
    (start,) = [i for i, line in enumerate(lines) if line.startswith("Error: ")]
    assert start == len(lines) - 1 or re.match("Error: (CheckpointError|FolderError): ", lines[start])
    assert all(line.startswith("  ") for line in lines[start + 1 :])
    return "\n".join(lines[start:])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama(tmp_path / "src")


@pytest.fixture(
    params=["missing folder", "config no json", "config too deep", "adapter", "cut safetensors", "several faults"]
)
def refusal(request: pytest.FixtureRequest) -> Refusal:
    """An error of each class. All refusals are in tests/conversion/test_convert.py."""
    return REFUSALS[request.param]


def test_installed_command_is_main() -> None:
    (command,) = entry_points(group="console_scripts", name="diffllama")
    assert command.load() is __main__.main


def test_convert_writes_a_folder_and_then_refuses_to_replace_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = call(capsys, "convert", source, tmp_path / "dest", "--from", "llama")
    assert status == 0
    assert f"Reading {source}\n" in err
    assert err.splitlines()[-1] == f"Wrote {tmp_path / 'dest'}"
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "dest")) is DiffLlamaForCausalLM

    before = snapshot(tmp_path)
    status, err = call(capsys, "convert", source, tmp_path / "dest", "--from", "llama")
    assert status == 1
    assert "dest exists and is not empty" in error_of(err)
    assert snapshot(tmp_path) == before


def test_python_m_diffllama_says_its_version() -> None:
    command = [sys.executable, "-m", "diffllama", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"diffllama {diffllama.__version__}\n", "")
    assert diffllama.__version__ == version("diffllama")


def test_folder_may_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "with space" / "[red]" / "a[/b]" / "ünï-模型" / "100%" / "{i}"
    source, dest = llama(folder / "src"), folder / "dest"
    status, err = call(capsys, "convert", source, dest, "--from", "llama")
    assert status == 0
    assert f"Reading {source}\n" in err
    assert err.splitlines()[-1] == f"Wrote {dest}"
    assert (dest / "config.json").is_file()


def test_refused_conversion_is_one_line_of_error(
    refusal: Refusal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, dest = prepared(refusal, tmp_path)
    before = snapshot(tmp_path)
    status, err = call(capsys, "convert", source, dest, "--from", "llama")
    assert status == 1
    assert re.search(refusal.message, error_of(err), re.DOTALL)
    assert snapshot(tmp_path) == before


def test_interruption_ends_with_status_130_and_changes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    before = snapshot(tmp_path)
    monkeypatch.setattr("diffllama.conversion.engine.updated_card", interrupt)
    status, _ = call(capsys, "convert", source, tmp_path / "dest", "--from", "llama")
    assert status == 130
    assert snapshot(tmp_path) == before


INTERRUPTED = """
import atexit, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            signal.raise_signal(signal.SIGINT)

moment, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Interrupt())
if moment == "end":
    atexit.register(signal.raise_signal, signal.SIGINT)
from diffllama.__main__ import main
main()
"""


@pytest.mark.parametrize("moment", ["diffllama.cli", "typer", "torch", "end"])
def test_interruption_at_any_moment_ends_without_a_traceback(moment: str) -> None:
    command = ["memory", "3b", "--context=1"] if moment != "end" else ["--version"]
    words = [sys.executable, "-c", INTERRUPTED, moment, *command]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "")


def interrupt_a_library(arguments: list[str], **options: Any) -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("numpy cannot be imported") from None


def interrupt_a_child(arguments: list[str], **options: Any) -> None:
    child = os.fork()
    if child == 0:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            os._exit(1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.parametrize("work", [interrupt_a_library, interrupt_a_child])
def test_interruption_ends_also_what_a_command_runs(
    work: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffllama.cli.app", work)
    assert call(capsys) == (130, "")


@pytest.mark.parametrize(
    ("typed", "read", "debug"),
    [
        ("check folder", "check folder", False),
        ("--debug check folder", "check folder", True),
        ("eval --debug --tasks all", "eval --tasks all", True),
        ("check folder --debug", "check folder", True),
        ("check -- --debug", "check -- --debug", False),
        ("--debug check -- --debug", "check -- --debug", True),
    ],
)
def test_debug_shows_the_traceback_of_any_command(
    typed: str, read: str, debug: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str], **options: Any) -> None:
        assert arguments == read.split()
        raise OSError("no such folder")

    monkeypatch.setattr("diffllama.cli.app", fail)
    if debug:
        with pytest.raises(OSError, match="no such folder"):
            call(capsys, *typed.split())
    else:
        assert call(capsys, *typed.split()) == (1, "Error: OSError: no such folder\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\n lines"), "ValueError: two lines"),
        (ModuleNotFoundError("no lm_eval"), "ModuleNotFoundError: no lm_eval"),
        (CheckpointError("a list:\n  one"), "CheckpointError: a list:\n  one"),
        (FolderError("a list:\n  one"), "FolderError: a list:\n  one"),
        (VerificationError("two\n  lines"), "VerificationError: two\n  lines"),
        (
            StrictDataclassFieldValidationError("x", ValueError("`x` must be 1, got 2.")),
            "StrictDataclassFieldValidationError: Validation error for field 'x': ValueError: `x` must be 1, got 2.",
        ),
        (KeyError("x"), "KeyError: 'x' (run again with --debug to see the traceback)"),
        (AssertionError(), "AssertionError: no message (run again with --debug to see the traceback)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_that_nobody_expects_say_how_to_see_more(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str], **options: Any) -> None:
        raise error

    monkeypatch.setattr("diffllama.cli.app", fail)
    assert call(capsys, "check") == (1, f"Error: {message}\n")


def test_convert_prints_what_it_verified(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, expected in {
        (): "Verified, promised: bit-equal. Logits of 3 sequences of 32 tokens in float32, sdpa attention, with and "
        "without cache: equal bit for bit.",
        ("--variant", "v1"): r"NOT EXACT, a warm start.* max difference [\d.]+, mean [\d.]+",
        ("--no-verify",): "Not verified: not asked for.",
    }.items():
        _, err = call(capsys, "convert", source, tmp_path / str(len(options)), "--from", "llama", *options)
        assert re.search(expected, err)


def test_every_option_reaches_the_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def convert(src: Any, dest: Path, **options: Any) -> Path:
        given.update(options, src=src, dest=dest)
        (tmp_path / "conversion.json").write_text('{"verification": {"skipped": "a test"}}')
        return tmp_path

    monkeypatch.setattr("diffllama.conversion.engine.convert", convert)
    monkeypatch.setattr("diffllama.cli.locate", lambda src, revision, patterns: tmp_path)
    monkeypatch.setattr("diffllama.cli.check_conversion", lambda *arguments: None)  # some options exclude each other
    options = (
        "--from unilm-v1 --gqa-layout repeated --noise-heads 2 --revision main --dtype float16 --verify --overwrite"
    )
    assert call(capsys, "convert", "some/model", "dest", *options.split(), "--max-shard-size", "1GB")[0] == 0
    assert callable(given.pop("progress"))
    assert given == {
        "src": "some/model", "dest": Path("dest"), "source": "unilm-v1", "target": None, "variant": None,
        "gqa_layout": "repeated", "noise_heads": 2, "revision": "main", "dtype": "float16", "verify": True,
        "overwrite": True, "max_shard_size": "1GB",
    }  # fmt: skip
    assert call(capsys, "convert", "src", "dest", "--to", "unilm-v2")[0] == 0
    assert (given["source"], given["target"], given["verify"], given["dtype"]) == (None, "unilm-v2", None, "auto")


class TestHubFolders:
    @pytest.fixture
    def ours(self, tmp_path: Path) -> Path:
        tiny_model("v1").save_pretrained(tmp_path / "ours")
        return tmp_path / "ours"

    def test_export_check_and_card_say_what_they_did(
        self, ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        dest = tmp_path / "[red] dest"
        options = "--license mit --base-model a/b --dataset c/d --dataset e/f --language en"
        status, err = call(capsys, "export", ours, dest, *options.split())
        assert (status, err.splitlines()[-1]) == (0, f"Wrote {dest}")
        assert "note  tokenizer.json:tokenizer: is missing" in err
        data = ModelCard.load(dest / "README.md").data
        assert (data.license, data.base_model, data.datasets, data.language) == ("mit", "a/b", ["c/d", "e/f"], "en")
        status, err = call(capsys, "check", dest)
        assert (status, err.splitlines()[-1]) == (0, f"Ready to be published: {dest}")

        card = dest / "README.md"
        card.write_text(card.read_text().replace("## Limits\n", "## Limits\n\nIt bites.\n"))
        status, err = call(capsys, "card", dest, "--license", "apache-2.0")
        assert (status, err.splitlines()) == (0, ["Kept the hand-edited section limits", f"Wrote {card}"])
        assert "It bites." in card.read_text()
        assert ModelCard.load(card).data.license == "apache-2.0"

        (dest / "x.json").write_text('{"hub_token": "abc"}')
        status, err = call(capsys, "check", dest)
        assert status == 1
        assert "error x.json:secret: `hub_token` is a secret\n" in err
        assert err.splitlines()[-1] == "Not ready to be published: 2 errors"
        status, err = call(capsys, "check", dest, "--allow", "x.json:secret", "--allow", "*.json:unknown-file")
        assert (status, err.splitlines()[-1]) == (0, f"Ready to be published: {dest}")

    def test_what_is_wrong_is_an_error_and_changes_nothing(
        self, ours: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (ours / "README.md").write_text("hf_abcdefghijklmnopqrstuvwxyz")
        before = snapshot(tmp_path)
        nowhere, dest = tmp_path / "nowhere", tmp_path / "dest"
        for command, message in {
            ("export", source, dest): "`model_type` of the source must be one of 'diff_llama', got 'llama'",
            ("export", nowhere, dest): "nowhere is not a folder",
            ("export", ours, ours / "dest"): "overlap",
            ("export", ours, dest): "README.md:secret: contains a secret: Hugging Face token",
            ("export", ours, dest, "--max-shard-size", "much"): "`max_shard_size` must be a number of bytes",
            ("check", nowhere): "nowhere is not a folder",
            ("card", nowhere): "nowhere is not a folder",
            ("check", ours, "--allow", "README.md"): "`allow` must be FILE:RULE",
            ("check", ours, "--allow", "x.txt:path"): "matches no finding",
            ("card", source): "got 'llama'",
            ("card", ours, "--results", nowhere): "nowhere is not a file or a folder with result files",
            ("push", ours, "me/model"): "README.md:secret: contains a secret: Hugging Face token",
            ("push", nowhere, "me/model"): "nowhere is not a folder",
            ("push", ours, "model"): "must be `owner/name`, got 'model'",
        }.items():
            status, err = call(capsys, *command)
            assert status == 1, command
            assert message in error_of(err), command
            assert snapshot(tmp_path) == before, command

    def test_every_option_reaches_the_push(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {}

        def push(folder: Path, repo: str, show: Any, **options: Any) -> Any:
            given.update(options, folder=folder, repo=repo)
            findings = [Finding("a.py", "[b]differs[/b]", "code-differs", "note")]
            show(UploadPlan(repo, "dev", False, True, {"[b]a.py": 1234}, ["model.safetensors"], findings))
            return UploadResult("http://localhost/commit", "0123", changed="new" in str(folder))

        monkeypatch.setattr("diffllama.hub_cards.upload.push", push)
        options = ("--private", "--revision=dev", "--code-only", "--replace-card", "--allow=a.py:code-differs")
        monkeypatch.chdir(tmp_path)
        for name in ("dir", "new"):
            (tmp_path / name).mkdir()
        status, err = call(capsys, "push", "dir", "me/model", *options)
        assert status == 0
        assert given == {
            "folder": Path("dir"), "repo": "me/model", "private": True, "revision": "dev", "code_only": True,
            "create_pr": False, "replace_card": True, "allow": ["a.py:code-differs"],
        }  # fmt: skip
        assert "note  a.py:code-differs: [b]differs[/b]" in err
        assert re.search(r"\[b\]a\.py +1,234", err)
        assert re.search(r"model\.safetensors +deleted", err)
        assert "Uploading to the private repository me/model, branch dev\n" in err
        assert err.splitlines()[-1] == "Nothing has changed: http://localhost/commit"
        _, err = call(capsys, "push", "new", "me/model", "--create-pr")
        assert err.splitlines()[-1] == "Uploaded: http://localhost/commit"
        assert given["create_pr"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "Give --from (one of llama, transformers, unilm-v1, unilm-v2, motif, perdix) or --to (one of transf"),
        ("--from llama --to transformers", "not both, got 'llama' and 'transformers'"),
        ("--to llama", "cannot be converted to 'llama'"),
        (
            "--from llama --gqa-layout repeated",
            "--gqa-layout must be one of grouped, repeated and needs --from unilm-v1",
        ),
        ("--to unilm-v1 --variant v1", "--variant must be one of v1, v2 and needs --from llama, got 'v1'"),
        ("--from perdix --noise-heads 2", "--noise-heads needs --from llama, got 2 with 'perdix'"),
        ("--from llama --noise-heads 3", "--noise-heads must divide the signal heads (4)"),
        ("--from llama --max-shard-size much", "--max-shard-size must be a number of bytes or a text like"),
        ("--from llama --revision main", "--revision is only for a repository of the Hub"),
    ],
)
def test_options_that_do_not_go_together_are_one_line_of_error(
    options: str, message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(tmp_path)
    status, err = call(capsys, "convert", source, tmp_path / "dest", *options.split())
    assert status == 1
    assert message in error_of(err)
    assert snapshot(tmp_path) == before


HEAVY = {"accelerate", "datasets", "lm_eval.evaluator", "numpy", "pandas", "peft", "scipy", "torch", "transformers"}
LIGHT = """
import sys
from diffllama.cli import main

results = {}
for line in sys.stdin.read().splitlines():
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        results[line] = end.code or 0, sorted(heavy & set(sys.modules))
print(results, file=sys.stderr)
"""


def run_in_light_process(lines: Iterable[str], cwd: Path) -> tuple[dict[str, tuple[int, list[str]]], str]:
    """Run command lines in one process.

    Returns:
        Exit status of each, and the modules of `HEAVY` imported after it; and stderr, on one line.
    """
    command = [sys.executable, "-c", f"heavy = {HEAVY}{LIGHT}"]
    result = subprocess.run(command, cwd=cwd, input="\n".join(lines), capture_output=True, text=True, check=True)
    return ast.literal_eval(result.stderr.splitlines()[-1]), " ".join(result.stderr.split())


def test_wrong_arguments_of_convert_are_refused_without_heavy_imports(tmp_path: Path) -> None:
    """These are invalid options, and sources that exist neither as a path nor as a repository."""
    commands = {
        "nowhere dest --from llama": (1, "nowhere does not exist. Name a folder, a file, or a repository of the Hub"),
        "models/llama dest --from llama": (1, "repository models/llama cannot be downloaded from the Hub"),
        "src dest --from bogus": (2, "'bogus'"),
        "src dest --to transformers --variant v1": (1, "--variant must be one of v1, v2 and needs --from llama"),
        "src dest --from llama --max-shard-size 5apples": (1, "--max-shard-size must be a number of bytes"),
        "--help": (0, ""),
    }
    results, printed = run_in_light_process([f"convert {arguments}" for arguments in commands], tmp_path)
    assert list(results.values()) == [(status, []) for status, _ in commands.values()]
    assert all(message in printed for _, message in commands.values())


def test_help_of_convert_fits_into_80_columns() -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["convert", "--help"])
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "…" not in result.output
    (first,) = [i for i, line in enumerate(lines) if line.startswith("  --from llama ")]
    assert lines[first + 1].startswith(" " * 23 + "files of these -> V2")  # with its line breaks, not wrapped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("convert SRC --from llama", "DEST"),
        ("convert --from llama", "SRC"),
        ("convert SRC DEST MORE --from llama", "MORE"),
        ("convert SRC DEST --from gpt2", "'llama'"),
        ("convert SRC DEST --from llama --dtype int8", "'bfloat16'"),
        ("convert SRC DEST --from llama --nonesuch", "--nonesuch"),
        ("nonesuch", "nonesuch"),
        ("--nonesuch", "--nonesuch"),
        ("", "convert"),
    ],
)
def test_wrong_command_line_is_named_with_usage(arguments: str, message: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments.split())
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert message in result.output
    assert "Usage: " in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--help", "convert export card check push --version --install-completion --show-completion"),
        ("export --help", "SRC DEST --license --base-model --dataset --results --overwrite"),
        ("card --help", "DIR --license --base-model --dataset --results"),
        ("check --help", "DIR pickles"),
        ("push --help", "DIR REPO --private --revision --code-only --create-pr --replace-card"),
        (
            "convert --help",
            "SRC DEST --from --to --dtype --overwrite --verify bfloat16 unilm-v1 --gqa-layout --variant --revision "
            "bit-identical",
        ),
    ],
)
def test_help_names_what_there_is(arguments: str, words: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments.split())
    assert result.exit_code == 0
    assert [word for word in words.split() if word not in result.output] == []


def test_help_and_wrong_options_import_nothing_that_takes_time(tmp_path: Path) -> None:
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    commands += ["", "probe", "probe needles"]
    lines = {f"{command} --help".strip(): 0 for command in commands}
    lines |= {f"{command} --nonesuch".strip(): 2 for command in commands}
    lines["--show-completion bash"] = 0
    results, _ = run_in_light_process(lines, tmp_path)
    assert results == {line: (status, []) for line, status in lines.items()}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command in this process. Returns its exit status, stdout and stderr."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["diffllama", *arguments])
        patch.setattr(shellingham, "detect_shell", lambda: ("fish", "fish"))
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code or 0, "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ("bash", 0, "complete -o default -F _diffllama_completion diffllama\n"),
        ("zsh", 0, "compdef _diffllama_completion diffllama\n"),
        ("fish", 0, "complete --command diffllama "),
        ("", 0, "complete --command diffllama "),
        ("tcsh", 1, "Shell tcsh not supported.\n"),
    ],
)
def test_show_completion_prints_the_script_of_the_named_or_the_current_shell(
    options: str, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, script = printed(capsys, "--show-completion", *options.split())
    assert code == status
    assert text in script


@pytest.mark.parametrize(
    ("options", "file"), [("bash", ".bash_completions/diffllama.sh"), ("", ".config/fish/completions/diffllama.fish")]
)
def test_install_completion_writes_the_script_of_the_named_or_the_current_shell(
    options: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    status, text = printed(capsys, "--install-completion", *options.split())
    assert (status, f"completion installed in {tmp_path / file}\n" in text) == (0, True)
    assert (tmp_path / file).read_text().strip() == printed(capsys, "--show-completion", *options.split())[1].strip()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("diffllama con", ["convert"]),
        ("diffllama pr", ["pretrain", "probe"]),
        ("diffllama convert --ver", ["--verify"]),
        ("diffllama convert src dest --from uni", ["unilm-v1", "unilm-v2"]),
        ("diffllama probe nee", ["needles"]),
    ],
)
def test_shell_completes_commands_options_and_values(
    words: str, completed: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    monkeypatch.setenv("_DIFFLLAMA_COMPLETE", "complete_bash")
    status, text = printed(capsys)
    assert (status, text.split()) == (0, completed)


def test_completion_imports_nothing_that_takes_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_WORDS", "diffllama con")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_DIFFLLAMA_COMPLETE", "complete_bash")
    assert run_in_light_process(["--version"], tmp_path)[0] == {"--version": (0, [])}
