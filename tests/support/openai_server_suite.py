"""Tests of an OpenAI-compatible server, the same for every engine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
import requests

from benchmarks.serving import Server
from support.markdown import blocks, commands


T = TypeVar("T")
QUESTION = "w6 w7 w8"
AT_ONCE = 64


PAGE = Path(__file__).parents[2] / "docs/serve.md"


def documented_command(program: str, folder: Path, port: int) -> list[str]:
    """Return the documented command that starts a server, with another folder, on a port."""
    (line,) = [line for line, _ in commands(PAGE) if line.startswith(f"{program} serve ")]
    _, serve, model, *options = line.split()
    assert model.startswith("demo/")
    return [str(Path(sys.executable).parent / program), serve, str(folder), *options, "--port", str(port)]


def documented_client(server: Server) -> str:
    """Run the documented client and return its output."""
    (block,) = [block for block in blocks(PAGE, "py") if block.title == "needs a running server"]
    code = block.text.replace("http://localhost:8000", server.url)
    code, count = re.subn(r"model = .*", f"model = {server.model!r}", code)
    assert count == 1
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def ask(server: Server, content: str = QUESTION, tokens: int = 8, **options: Any) -> Any:
    """Return the answer to a chat message, or its chunks with `stream=True`."""
    messages = [{"role": "user", "content": content}]
    create = server.client().chat.completions.create
    answer = create(model=server.model, messages=messages, max_tokens=tokens, temperature=0, **options)
    return answer if options.get("stream") else answer.choices[0].message.content


def post(server: Server, body: bytes | dict[str, Any]) -> requests.Response:
    """Send a chat request with a given body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return requests.post(f"{server.url}/v1/chat/completions", data=content, headers=headers, timeout=120)


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request with `QUESTION`; fields replace its own."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": server.model, "messages": messages, "max_tokens": 8, "temperature": 0} | fields


def begin_stream(server: Server, then: Callable[[], T], tokens: int = 900) -> T:
    """Call a function once the first chunk of a long answer has arrived, then disconnect."""
    body = chat(server, stream=True, max_tokens=tokens)
    with requests.post(f"{server.url}/v1/chat/completions", json=body, stream=True, timeout=120) as response:
        lines = response.iter_lines()  # the connection lasts as long as this iterator
        while '"content":' not in next(lines).decode():
            pass
        return then()


def computes(server: Server, seconds: float = 0.5) -> bool:
    """Tell whether the server and its children use more than a tenth of a core during a time in seconds."""
    server_process = psutil.Process(server.process.pid)
    processes = [server_process, *server_process.children(recursive=True)]

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    begun = used()
    time.sleep(seconds)
    return used() - begun > 0.1 * seconds


def check_it_stops(server: Server, within: float = 30) -> None:
    """Check that SIGTERM in the middle of an answer ends the server, with any status."""
    begin_stream(server, lambda: os.kill(server.process.pid, signal.SIGTERM))
    server.process.wait(within)


class Answering:
    """Tests of the fixture `server`. The fixture `answers` has the right answers to `QUESTION` and other messages."""

    client_errors = 500
    """Upper limit of the status of requests whose fields have wrong types."""

    long = 900
    """Tokens of an answer that takes longer than 20 s when eight clients request it."""

    def test_server_chats(self, server: Server, answers: dict[str, str]) -> None:
        assert {content: ask(server, content) for content in answers} == answers

    def test_server_streams(self, server: Server, answers: dict[str, str]) -> None:
        chunks = [chunk for chunk in ask(server, stream=True) if chunk.choices]
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        assert len(pieces) > 4
        assert "".join(pieces) == answers[QUESTION]

    def test_documented_client_is_answered(self, server: Server) -> None:
        assert len(documented_client(server).split()) > 10

    def test_server_answers_many_at_once(self, server: Server, answers: dict[str, str]) -> None:
        contents = [list(answers)[i % len(answers)] for i in range(AT_ONCE)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            received = list(pool.map(lambda content: ask(server, content), contents))
        assert received == [answers[content] for content in contents]

    def test_server_answers_after_clients_disconnect(self, server: Server, answers: dict[str, str]) -> None:
        with ThreadPoolExecutor(8) as pool:
            began = [pool.submit(begin_stream, server, lambda: computes(server), self.long) for _ in range(8)]
        assert all(client.result() for client in began)
        assert ask(server) == answers[QUESTION]
        deadline = time.monotonic() + 20
        while computes(server):
            assert time.monotonic() < deadline

    def test_malformed_requests_are_refused(self, server: Server, answers: dict[str, str]) -> None:
        for body in (b"{", b"[]", b'"text"', b"\xff\xfe"):
            response = post(server, body)
            assert 400 <= response.status_code < 500, (body, response.status_code, response.text)
            assert response.json()
        for fields in ({"messages": "w6"}, {"max_tokens": "many"}, {"temperature": "warm"}):
            response = post(server, chat(server, **fields))
            assert 400 <= response.status_code < self.client_errors, (fields, response.status_code, response.text)
        assert ask(server) == answers[QUESTION]
