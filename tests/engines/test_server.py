"""Unmodified `vllm serve` serves our folders to OpenAI's client."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


pytest.importorskip("vllm")

from benchmarks.serving import Server, free_port, serve
from support import folder_generation
from support.openai_server_suite import QUESTION, Answering, ask, chat, check_it_stops, documented_command, post


FOLDERS = Path(__file__).parents[2] / "build/vllm"
FOLDER = FOLDERS / "smollm2"
CONTENTS = [QUESTION, "Why is the sky blue?", "Name a colour.", "What is two and two? " * 30]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("served") / "log"
    words = [*documented_command("vllm", FOLDER, port), "--dtype", "float32", "--enforce-eager"]
    with serve(words, port, str(FOLDER), log) as server:
        yield server


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    with folder_generation.another_process() as process:
        return process.submit(folder_generation.answers, FOLDER, CONTENTS, 8).result()


class TestServer(Answering):
    """`vllm serve`."""


def test_server_writes_what_a_schema_asks_for(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer", "maximum": 9}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    said = json.loads(ask(server, "What is the capital of France?", tokens=60, response_format=form))
    assert said["city"] in ("Paris", "Rome")
    assert isinstance(said["people"], int)


def test_prompts_that_are_too_long_are_refused(server: Server, answers: dict[str, str]) -> None:
    response = post(server, chat(server, messages=[{"role": "user", "content": "word " * 2000}]))
    assert response.status_code == 400
    assert "1024" in response.text  # --max-model-len
    assert ask(server) == answers[QUESTION]


def test_unknown_parameters_change_nothing(server: Server, answers: dict[str, str]) -> None:
    assert post(server, chat(server, temprature=1)).json()["choices"][0]["message"]["content"] == answers[QUESTION]


def test_its_cache_holds_what_memory_tells(server: Server) -> None:
    held = int(re.search(r"KV cache size: ([\d,]+) tokens", server.log.read_text())[1].replace(",", ""))
    estimate = json.loads((FOLDERS / "memory.json").read_text())
    assert 0.99 * 2**30 < held * estimate["cache_per_token"] <= 2**30  # VLLM_CPU_KVCACHE_SPACE, in whole blocks


def test_server_stops_in_the_middle_of_an_answer(server: Server) -> None:
    check_it_stops(server)


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_adapters_are_served_beside_their_model(variant: str, tmp_path: Path) -> None:
    folder, port = FOLDERS / f"{variant}-gqa", free_port()
    words = [*documented_command("vllm", folder, port), "--max-model-len=256", "--dtype=float32", "--enforce-eager"]
    words += ["--enable-lora", "--max-lora-rank=8", f"--lora-modules=adapter={FOLDERS / f'{variant}-adapter'}"]
    with folder_generation.another_process() as process, serve(words, port, str(folder), tmp_path / "log") as server:
        for model, same in ((str(folder), folder), ("adapter", FOLDERS / f"{variant}-merged")):
            (expected,) = process.submit(folder_generation.answers, same, [QUESTION], 8).result().values()
            answer = ask(dataclasses.replace(server, model=model))
            assert answer.strip() == expected  # vLLM's begins with a space
