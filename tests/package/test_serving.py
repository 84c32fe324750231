"""`diffllama serve`, which is `transformers serve`, serves our folders to OpenAI's client."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import generating
import pytest
from asking import QUESTION, Answering, ask, chat, check_it_stops, post, readme_command
from tiny import tiny_model, tiny_tokenizer

from benchmarks.serving import Server, free_port, serve
from diffllama.serving import run


pytestmark = pytest.mark.slow

CONTEXT = 12_000
CONTENTS = [QUESTION, "w9", "w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20", "w6 w90 w6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tiny_model("v1", max_position_embeddings=CONTEXT).save_pretrained(folder)  # V2 differs in no call of a server
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    port = free_port()
    words = readme_command("diffllama", folder, port)
    with serve(words, port, str(folder), folder / "log", {"HF_MODULES_CACHE": str(folder / "modules")}) as server:
        yield server


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, str]:
    found = generating.answers(folder, CONTENTS, 8)
    assert len(set(found.values())) == len(found)
    return found


class TestServer(Answering):
    """`diffllama serve`."""

    client_errors = 600  # transformers 5.23 says 500
    long = 10_000


def test_unknown_parameters_are_refused(server: Server) -> None:
    response = post(server, chat(server, temprature=1))
    assert response.status_code == 422
    assert "temprature" in response.text


def test_prompts_that_are_too_long_are_refused(server: Server, answers: dict[str, str]) -> None:
    for stream in (False, True):
        response = post(
            server, chat(server, messages=[{"role": "user", "content": "w7 " * (CONTEXT + 1)}], stream=stream)
        )
        assert response.status_code == 400
        assert str(CONTEXT) in response.text
    assert ask(server) == answers[QUESTION]


def test_answers_end_where_the_models_context_does(server: Server) -> None:
    long = chat(server, messages=[{"role": "user", "content": "w7 " * (CONTEXT - 20)}], max_tokens=10**6)
    assert post(server, long).json()["usage"]["total_tokens"] == CONTEXT


def test_it_stops_in_the_middle_of_an_answer(server: Server) -> None:
    check_it_stops(server)


def test_what_is_no_model_is_said_so(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "diffllama", "serve", str(tmp_path / "nowhere")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ModuleNotFoundError, match=r"diffllama\[serve\]"):
        run([])
