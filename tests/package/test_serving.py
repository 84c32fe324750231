"""`diffllama serve`, that is `transformers serve`, serves our folders to OpenAI's client."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from starlette.testclient import TestClient
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager, utils
from typer.testing import CliRunner

from benchmarks.serving import Server, free_port, serve
from diffllama import DiffLlamaForCausalLM
from diffllama.cli import app
from diffllama.serving import MAX_BODY_SIZE, check_options, command, run
from support import folder_generation
from support.openai_server_suite import QUESTION, Answering, ask, chat, check_it_stops, documented_command, post
from support.tiny_models import tiny_model, tiny_tokenizer


UsageError = typer.BadParameter.__base__
CONTEXT = 12_000
CONTENTS = [QUESTION, "w9", "w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20", "w6 w90 w6"]


@pytest.fixture(scope="module", autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Restore the classes and signal handlers that `run` changes in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    vars(model_manager.transformers).pop(DiffLlamaForCausalLM.__name__, None)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tiny_model("v1", max_position_embeddings=CONTEXT).save_pretrained(folder)  # servers call V2 in the same way
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    port = free_port()
    words = documented_command("diffllama", folder, port)
    with serve(words, port, str(folder), folder / "log", {"HF_MODULES_CACHE": str(folder / "modules")}) as server:
        yield server


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, str]:
    found = folder_generation.answers(folder, CONTENTS, 8)
    assert len(set(found.values())) == len(found)
    return found


@pytest.mark.slow
class TestServer(Answering):
    """`diffllama serve`."""

    client_errors = 600  # transformers 5.23 returns status 500
    long = 10_000


@pytest.mark.slow
def test_unknown_parameters_are_refused(server: Server) -> None:
    response = post(server, chat(server, temprature=1))
    assert response.status_code == 422
    assert "temprature" in response.text


@pytest.mark.slow
def test_prompts_that_are_too_long_are_refused(server: Server, answers: dict[str, str]) -> None:
    for stream in (False, True):
        response = post(
            server, chat(server, messages=[{"role": "user", "content": "w7 " * (CONTEXT + 1)}], stream=stream)
        )
        assert response.status_code == 400
        assert str(CONTEXT) in response.text
    assert ask(server) == answers[QUESTION]


@pytest.mark.slow
def test_answers_end_where_the_models_context_does(server: Server) -> None:
    long = chat(server, messages=[{"role": "user", "content": "w7 " * (CONTEXT - 20)}], max_tokens=10**6)
    assert post(server, long).json()["usage"]["total_tokens"] == CONTEXT


@pytest.mark.slow
def test_server_stops_in_the_middle_of_an_answer(server: Server) -> None:
    check_it_stops(server)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        CliRunner().invoke(app, ["serve", str(tmp_path / "nowhere"), "--port", "8001"], catch_exceptions=False)
    check_options([f"{tmp_path}:model.gguf"])
    check_options(["owner/name"])


SHORT = 64
"""Tokens of the context of a model that is served in this process."""

BATCHING = ["--continuous-batching", "--attn-implementation=sdpa", "--cb-num-blocks=16", "--cb-max-batch-tokens=64"]
LONG = "w6 " * SHORT


class InProcess:
    """A server in this process, and its model folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            servers: list[uvicorn.Server] = []
            states: list[utils.GenerationState] = []
            make_state = utils.GenerationState.__init__

            def remember(state: utils.GenerationState, *args: Any, **kwargs: Any) -> None:
                states.append(state)
                make_state(state, *args, **kwargs)

            patch.setattr(utils.GenerationState, "__init__", remember)
            patch.setattr(uvicorn.Server, "run", lambda server: servers.append(server))
            run([str(folder), *options])
        self.folder = folder
        (self.state,) = states
        self.client = TestClient(servers[0].config.app)

    def complete(self, prompt: str = "w6 w7", **fields: Any) -> Any:
        body = {"model": str(self.folder), "prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
        return self.client.post("/v1/completions", json=body)


@pytest.fixture(scope="module", params=[[], BATCHING], ids=["one by one", "in continuous batches"])
def local(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("local")
    tiny_model("v1", max_position_embeddings=SHORT).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    server = InProcess(folder, *request.param)
    yield server
    server.state.shutdown()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [(LONG, 4, f"has {SHORT} tokens, and the model's context {SHORT}"), ("", 4, "is empty"), ("w6", 0, "got 0")],
    ids=["long", "empty", "no answer"],
)
def test_requests_that_cannot_be_answered_are_refused_and_others_are_not(
    prompt: str, tokens: int, message: str, stream: bool, local: InProcess
) -> None:
    refused = local.complete(prompt, max_tokens=tokens, stream=stream)
    assert (refused.status_code, message in refused.text) == (400, True)
    assert local.client.get("/health").status_code == 200
    assert local.complete().json()["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


@pytest.mark.parametrize("fields", [{"max_tokens": 10**9}, {"max_tokens": None, "generation_config": "{}"}], ids=str)
def test_answer_ends_where_the_context_does(fields: dict[str, Any], local: InProcess) -> None:
    answer = local.complete("w6 " * (SHORT - 3), **fields).json()
    assert answer["usage"]["total_tokens"] == SHORT
    assert answer["choices"][0]["finish_reason"] == "length"


def test_large_bodies_are_refused_before_they_are_read(local: InProcess) -> None:
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        while sent < 4 * MAX_BODY_SIZE:
            yield bytes(2**20)
            sent += 2**20

    assert local.complete("w" * MAX_BODY_SIZE).status_code == 413
    assert local.client.post("/v1/completions", content=pieces()).status_code == 413
    assert local.complete("w6" + " " * 2**20).status_code == 200


def test_server_of_a_model_loads_no_other(local: InProcess, tmp_path: Path) -> None:
    for name in (str(tmp_path), "", f"{local.folder}@other"):
        refused = local.client.post("/load_model", json={"model": name})
        assert (refused.status_code, "pinned" in refused.text) == (400, True)
    assert '"ready"' in local.client.post("/load_model", json={"model": str(local.folder)}).text


@pytest.mark.parametrize("local", [BATCHING], indirect=True, ids=["in continuous batches"])
def test_requests_in_python_take_every_argument_of_transformers(local: InProcess) -> None:
    assert local.complete().status_code == 200
    manager = local.state._cb_manager._cb
    assert manager.add_request([6, 7], "mine", None, False) == "mine"
    assert len(manager.get_result("mine", timeout=60).generated_tokens) == 4  # the request before started it


def test_ctrl_c_ends_a_server_without_waiting_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: signal.raise_signal(signal.SIGINT))  # as uvicorn ends
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        run([])
    assert end.value.code == 130


@pytest.mark.parametrize("options", [["--prot=1"], ["--port=many"], ["one", "two"]], ids=" ".join)
def test_wrong_options_are_refused_as_by_transformers(options: list[str]) -> None:
    messages = []
    for read in (check_options, lambda options: command(Serve).make_context("serve", options)):
        with pytest.raises(UsageError) as raised:
            read(options)
        messages.append(raised.value.format_message())
    assert messages[0] == messages[1]


def test_unknown_attention_function_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="'nonsense'"):
        run([str(folder), "--attn-implementation=nonsense"])


def test_serve_without_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[serve\]'"):
        run([])
