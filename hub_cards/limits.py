# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading hostile files in a process of its own, with limits of time and memory."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from diffllama.hub_cards.findings import Finding


SECONDS = 60.0
"""The longest that a single file, or a piece of the weights, may take."""

MEMORY = 2 * 2**30
"""Bytes that the process may use besides those of its libraries (on Linux; other systems enforce no such limit)."""

Inspection = Callable[[Path], Iterator[Finding | str]]
"""Yields the name of each file before it is read, and what is found."""


def inspect_with_limits(inspect: Inspection, folder: Path) -> list[Finding]:
    """What an inspection finds, in a process that is ended when it exceeds a limit; this is then a finding too.

    The process is a fork on Linux, so that nothing is imported again. Elsewhere forks are not safe or do not exist.
    """
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, inspect, folder), daemon=True)
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe
    findings: list[Finding] = []
    file = folder.name
    rest = "What comes after it was not checked"
    try:
        while True:
            if not receiver.poll(SECONDS):
                findings.append(Finding(file, f"takes longer than {SECONDS:g} s to read. {rest}", "limits"))
                break
            item = receiver.recv()
            if item is None:
                break
            if isinstance(item, Finding):
                findings.append(item)
            else:
                file = item
    except EOFError:
        process.join()
        message = f"ends the process that reads it (exit code {process.exitcode}). {rest}"
        findings.append(Finding(file, message, "limits"))
    finally:
        process.kill()
        process.join()
        receiver.close()
    return findings


def _run(sender: Connection, inspect: Inspection, folder: Path) -> None:
    """Runs an inspection in the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers' threads do not survive a fork
    limit_memory()
    for item in inspect(folder):
        sender.send(item)
    sender.send(None)


def limit_memory() -> None:
    """Limits what this process may allocate from now on to `MEMORY`."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
