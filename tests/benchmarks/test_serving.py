import io
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.serving import MODELS, Engine, answer, command, free_port, prompts, run, serve, table
from support.openai_server_suite import documented_command
from support.tiny_models import tiny_tokenizer


STUB = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if asked.get("stream") else "application/json")
        self.end_headers()
        for i in range(3 if asked.get("stream") else 1):
            time.sleep(PAUSE)
            part = json.dumps({"id": "1", "object": "text_completion", "created": 0, "model": "m",
                "choices": [{"index": 0, "text": f"w{6 + i} ", "finish_reason": None, "logprobs": None}]})
            self.wfile.write(f"data: {part}\\n\\n".encode() if asked.get("stream") else part.encode())
            self.wfile.flush()

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stub(port: int, pause: float = 0.01) -> list[str]:
    """A server that answers every prompt with three words."""
    return [sys.executable, "-c", STUB.replace("PAUSE", str(pause)), str(port)]


def test_servers_are_loaded_in_turn_and_compared(tmp_path: Path) -> None:
    fast, slow = free_port(), free_port()
    with (
        serve(stub(fast), fast, "m", tmp_path / "fast") as quick,
        serve(stub(slow, 0.05), slow, "m", tmp_path / "slow") as lame,
    ):
        assert answer(quick, "w6", 4) == "w6 "
        rows = run({"llama": quick, "diff": lame}, [1, 3], 4, 5, 8, 2, tiny_tokenizer())
    assert [(row["clients"], row["server"]) for row in rows] == [(1, "llama"), (1, "diff"), (3, "llama"), (3, "diff")]
    for row in rows:
        lame = row["server"] == "diff"
        assert len(row["rounds"]) == len(row["ratios"]) == 2
        assert all(0.1 < ratio < 0.7 if lame else ratio == 1 for ratio in row["ratios"])  # 1/5 if nothing else runs
        for seen in row["rounds"]:
            assert seen["tokens_per_second"] == pytest.approx(3 * seen["requests_per_second"])
            assert seen["first_token_ms"] >= (50 if lame else 10)
    console = Console(width=140, file=io.StringIO())
    console.print(table(rows))
    assert console.file.getvalue().count("MISSED") == 2


def test_prompts_differ() -> None:
    made = prompts(32, 128) + prompts(32, 128, first=32)
    assert len({text[:4] for text in made}) == 64
    assert {len(text.split()) for text in made} == {128}


def test_server_that_does_not_start_is_reported_with_its_output(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match=r"(?s)ended with status 3:.*no such model"),
        serve(words, free_port(), "m", tmp_path / "log"),
    ):
        raise AssertionError
    words = [sys.executable, "-c", "import time; print('thinking', flush=True); time.sleep(100)"]
    begun = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"(?s)does not answer:.*thinking"),
        serve(words, free_port(), "m", tmp_path / "log", patience=3),
    ):
        raise AssertionError
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_commands_are_the_documented_ones_with_a_dtype(engine: Engine) -> None:
    program = {"transformers": "diffllama", "vllm": "vllm"}[engine]
    _, _, _, *options, _, _ = documented_command(program, Path("folder"), 8000)
    words = command(engine, "bin/python", "folder", 8000, "float32", MODELS[engine]["diff"])
    assert Path(words[0]).name == program
    assert set(re.sub(r"(--\S+) (?!-)", r"\1=", " ".join(options)).split()) <= set(words)
