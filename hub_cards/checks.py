# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a folder before it is published, in a process with limited time and memory, because it may be hostile."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from diffllama.hub_cards.findings import Finding, apply_allowlist, check_arguments


TIME_LIMIT = 60.0
"""Seconds that reading a single file, or a single tensor, may take."""

MEMORY_LIMIT = 2 * 2**30
"""Bytes that the process may allocate besides its libraries. Enforced on Linux only."""


def check(folder: str | os.PathLike[str], *, allow: Sequence[str] = (), code_only: bool = False) -> list[Finding]:
    """Check a folder before it is published.

    A model folder consists of known files; any other is an error. Every file must match its name and load with the
    installed libraries, never with the folder's own code. The code must be the package's. The weights must be
    finite and match the configuration. Pickles, secrets and local paths are errors.

    Args:
        folder: a folder with a diffllama model.
        allow: findings to downgrade to notes, as FILE:RULE, with which the text of a finding begins. FILE may be a
            pattern.
        code_only: whether to check only the folder's code.

    Returns:
        The findings, errors and notes.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: an entry of `allow` is not FILE:RULE.
        FolderError: an entry of `allow` matches no finding.
    """
    check_arguments(folder, allow)
    from diffllama.hub_cards.folder_checks import inspect_code, inspect_folder  # takes seconds to import

    return apply_allowlist(run_isolated(inspect_code if code_only else inspect_folder, folder), allow)


def run_isolated(inspect: Callable[[Path], Iterator[Finding | str]], folder: str | os.PathLike[str]) -> list[Finding]:
    """Return the findings of an inspection in a process of its own, each once.

    The process is killed when it exceeds a limit, which is a finding too. On Linux it is forked, so that it imports
    nothing again. On other systems forks are unsafe or unavailable.
    """
    folder = Path(os.path.abspath(folder))
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, inspect, folder), daemon=True)
    process.start()
    sender.close()  # so that the pipe closes when the process ends
    findings: list[Finding] = []
    file = folder.name
    failure: str | None = None
    try:
        while failure is None:
            if not receiver.poll(TIME_LIMIT):
                failure = f"takes longer than {TIME_LIMIT:g} s to read"
            elif (item := receiver.recv()) is None:
                break
            elif isinstance(item, Finding):
                findings.append(item)
            else:
                file = item
    except EOFError:
        process.join()
        failure = f"crashes the process that reads it (exit code {process.exitcode})"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if failure is not None:
        findings.append(Finding(file, f"{failure}. The files after it were not checked", "limits"))
    return list(dict.fromkeys(findings))


def _child(sender: Connection, inspect: Callable[[Path], Iterator[Finding | str]], folder: Path) -> None:
    """Run an inspection and send its findings, then `None`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of tokenizers do not survive a fork
    limit_memory()
    for item in inspect(folder):
        sender.send(item)
    sender.send(None)


def limit_memory() -> None:
    """Limit further allocations of this process to `MEMORY_LIMIT`."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    limit = pages * resource.getpagesize() + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
