import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest


pytest.importorskip("gradio", reason="needs the extra `explore`")

from huggingface_hub import SpaceCard
from typer.testing import CliRunner

from diffllama.cli import app
from diffllama.explorer import space
from diffllama.hub_cards.checks import check
from support.tiny_models import tiny_model, tiny_tokenizer


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("v2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("spaces") / "tiny-space"
    result = CliRunner().invoke(app, ["export", str(model), str(folder), "--space", "--license", "apache-2.0"])
    assert result.exit_code == 0, result.output
    return folder


def test_card_tells_the_hub_how_to_start_it(written: Path) -> None:
    card = SpaceCard.load(written / "README.md").data
    assert (card.sdk, card.app_file, card.license, card.title) == ("gradio", "app.py", "apache-2.0", "tiny-space")
    assert (written / card.app_file).is_file()
    assert card.sdk_version
    lines = (written / "requirements.txt").read_text().splitlines()
    assert any(line.startswith("transformers<5.24") for line in lines)
    assert any(line.startswith("plotly") for line in lines)
    assert not any(line.startswith("gradio") for line in lines)
    assert not any("extra ==" in line for line in lines)


def test_model_in_the_space_is_complete(written: Path) -> None:
    assert check(written / "model") == []


def test_every_package_is_in_the_space(written: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    packages = re.findall(r'^"(diffllama[\w.]*)" = "', project.partition("package-dir]")[2].partition("\n\n")[0], re.M)
    assert len(packages) >= 9
    for package in [*packages, "diffllama.explorer", "diffllama.evaluation.tasks"]:
        assert (written / package.replace(".", "/") / "__init__.py").is_file(), package
    assert not list(written.rglob("__pycache__"))
    assert (written / "diffllama/explorer/plots.js").is_file()


@pytest.mark.slow
def test_space_starts_as_on_the_hub(written: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    where = "import diffllama.explorer.maps as m, diffllama.cli as c; print(m.__file__, c.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=written, env=environment, capture_output=True, text=True, check=True
    )
    assert [Path(file).is_relative_to(written) for file in found.stdout.split()] == [True, True]
    log = tmp_path / "log.txt"
    with (
        log.open("w") as stream,
        subprocess.Popen(
            [sys.executable, "app.py"], cwd=written, env=environment, stdout=stream, stderr=stream
        ) as process,
    ):
        try:
            while "http://" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as response:
                assert response.status == 200
                assert "diffllama explorer" in response.read().decode()
        finally:
            process.terminate()


def test_folder_that_is_not_empty_is_kept(tmp_path: Path, model: Path) -> None:
    (tmp_path / "app.py").write_text("mine")
    with pytest.raises(FileExistsError):
        space.write_space(model, tmp_path, {})
    assert [file.name for file in tmp_path.iterdir()] == ["app.py"]


def test_failed_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        space.write_space(tmp_path / "missing", tmp_path / "space", {})
    assert not list(tmp_path.iterdir())


def test_overwriting_a_space_is_refused(tmp_path: Path, model: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(model), str(tmp_path / "space"), "--space", "--overwrite"])
    assert "--space writes a new folder only" in str(result.exception)
