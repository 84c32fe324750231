import socket
from urllib.parse import quote

import pytest


pytest.importorskip("gradio", reason="needs the extra `explore`")

from starlette.testclient import TestClient

from diffllama.evaluation.models import LoadedModel
from diffllama.explorer.server import LOOPBACK, application, serve
from support.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def client() -> TestClient:
    model = LoadedModel(name="tiny", model=tiny_model(attn_implementation="sdpa"), tokenizer=tiny_tokenizer())
    with TestClient(application([model], LOOPBACK), base_url="http://127.0.0.1:7860") as client:
        yield client


def test_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "http" not in policy
    assert "*" not in policy


def test_script_of_plotly_is_served(client: TestClient) -> None:
    script = client.get("/plotly.min.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "plotly.js v" in script.text[:300]


SECRET = "top secret"


@pytest.mark.parametrize(
    "beginning", ["/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/", "/svelte/"]
)
@pytest.mark.parametrize("way", ["absolute", "relative", "quoted", "working folder"])
def test_no_file_can_be_read(
    client: TestClient, tmp_path, monkeypatch: pytest.MonkeyPatch, beginning: str, way: str
) -> None:
    (tmp_path / "secret.txt").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    path = {
        "absolute": str(tmp_path / "secret.txt"),
        "relative": "../" * 30 + str(tmp_path / "secret.txt").lstrip("/"),
        "quoted": quote("../" * 30 + str(tmp_path / "secret.txt").lstrip("/"), safe=""),
        "working folder": "secret.txt",
    }[way]
    response = client.get(beginning + path)
    assert response.status_code in (400, 403, 404)
    assert SECRET not in response.text
    assert str(tmp_path) not in response.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/gradio_api/upload"),
        ("GET", "/gradio_api/proxy=http://127.0.0.1:1/"),
        ("GET", "/monitoring"),
        ("GET", "/gradio_api/runs"),
        ("POST", "/gradio_api/vibe-edit"),
        ("GET", "/login_check"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
    ],
)
def test_other_routes_do_not_exist(client: TestClient, method: str, path: str) -> None:
    assert client.request(method, path).status_code == 404


def test_page_of_another_name_is_refused(client: TestClient) -> None:
    assert client.get("/", headers={"host": "evil.example:7860"}).status_code == 400
    assert client.get("/", headers={"host": "localhost:7860"}).status_code == 200


def test_no_path_of_the_machine_is_in_the_page(client: TestClient) -> None:
    from pathlib import Path

    text = client.get("/").text + client.get("/config").text
    for path in (Path.cwd(), Path.home(), Path(__file__).parents[2]):
        assert str(path) == "/" or f"{path}/" not in text


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"--host 127.0.0.1 --port {port}: .* Name another port"):
            serve([], "127.0.0.1", port, print)
