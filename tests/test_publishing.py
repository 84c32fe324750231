"""The commands of docs/publish.md with the real client: upload, and loading on other machines."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from diffllama import DiffLlamaForCausalLM
from diffllama.cli import app
from support import subprocess_runner
from support.fake_hub import Hub, connect
from support.markdown import ROOT, blocks, commands
from support.tiny_models import EVERY_FEATURE, tiny_model, tiny_tokenizer


pytestmark = pytest.mark.slow

(CODE,) = [block.text for block in blocks(ROOT / "docs/publish.md", "python")]
LINES = [line.split() for line, _ in commands(ROOT / "docs/publish.md")]
NEWER = "\nNEWER = True\n"

FRESH = """
import sys
sys.modules["diffllama"] = None  # from here on importing it fails
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
tensors, ids = {}, torch.arange(1, 14)[None]
def look(name, model):
    with torch.no_grad():
        tensors[name] = model.eval()(ids).logits
    module = sys.modules[type(model).__module__]
    helper = sys.modules[module.__name__.rpartition(".")[0] + ".differential_attention"]
    facts[name] = [module.__name__, hasattr(helper, "NEWER")]
    return model
"""

LOAD = f"""
{CODE}
look("readme", generator.model)

first, newest = sys.argv[1:]
trusted = {{"trust_remote_code": True}}
look("newest", AutoModelForCausalLM.from_pretrained("user/name", **trusted))
look("pinned", AutoModelForCausalLM.from_pretrained("user/name", revision=first, **trusted))
look("newer code", AutoModelForCausalLM.from_pretrained("user/name", revision=first, code_revision=newest, **trusted))

from huggingface_hub import snapshot_download
look("snapshot", AutoModelForCausalLM.from_pretrained(snapshot_download("user/name"), **trusted))

model = AutoModelForCausalLM.from_pretrained("user/name", **trusted)
loss = model(ids, labels=ids).loss
loss.backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
look("tuned", model)
model.push_to_hub("user/tuned")
AutoTokenizer.from_pretrained("user/name", **trusted).push_to_hub("user/tuned")
save_file(tensors, "tensors.safetensors")
"""

ELSEWHERE = """
look("tuned", AutoModelForCausalLM.from_pretrained("user/tuned", trust_remote_code=True))
generator = transformers.pipeline("text-generation", "user/tuned", trust_remote_code=True)
look("pipeline", generator.model)
save_file(tensors, "tensors.safetensors")
"""

OFFLINE = """
look("newest", AutoModelForCausalLM.from_pretrained("user/name", trust_remote_code=True))
look("pinned", AutoModelForCausalLM.from_pretrained("user/name", revision=sys.argv[1], trust_remote_code=True))
AutoTokenizer.from_pretrained("user/name", trust_remote_code=True)
save_file(tensors, "tensors.safetensors")
"""


@dataclass
class Answer:
    """Results of a process, and its requests."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
    requests: list[Any]


@dataclass
class Story:
    """A published model, and the results of processes on other machines."""

    hub: Hub
    folder: Path
    first: str
    newest: str
    output: str
    answers: dict[str, Answer]


def run_commands(lines: list[list[str]]) -> str:
    """Run lines of the command line, which must succeed. Returns their output."""
    output = ""
    for _, *words in lines:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output)
        output += result.output
    return output


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    work = tmp_path_factory.mktemp("publishing")
    tiny_model("v2", **EVERY_FEATURE).save_pretrained(work / "path/to/checkpoint")
    tiny_tokenizer().save_pretrained(work / "path/to/checkpoint")
    (work / "path/to/lm-eval-results").mkdir()
    results = {"results": {"piqa": {"acc,none": 0.75}}, "n-shot": {"piqa": 0}, "lm_eval_version": "0.4.13"}
    (work / "path/to/lm-eval-results/results_1.json").write_text(json.dumps(results))

    with Hub() as hub:
        with pytest.MonkeyPatch.context() as patch:
            connect(hub, work / "publisher", patch)
            patch.setenv("HF_TOKEN", "hf_user")
            patch.chdir(work)
            output = run_commands(LINES[:4])
            folder, repository = work / "path/to/hub-folder", hub.repositories["user/name"]
            first = repository.refs["main"]
            shutil.copytree(folder, work / "published")
            with (folder / "differential_attention.py").open("a") as file:
                file.write(NEWER)
            output += run_commands([[*line, "--allow", "differential_attention.py:code-differs"] for line in LINES[4:]])
            newest = repository.refs["main"]

        def elsewhere(code: str, *arguments: str, home: str, token: str | None = None, offline: bool = False) -> Answer:
            """Run code in a process with the environment of another machine."""
            before = len(hub.requests)
            (work / home).mkdir(exist_ok=True)
            environment = hub.environment(work / home, token) | {"HF_HUB_OFFLINE": str(int(offline))}
            facts, _ = subprocess_runner.run(FRESH + code, *arguments, environment=environment, cwd=work / home)
            return Answer(load_file(work / home / "tensors.safetensors"), facts, hub.requests[before:])

        answers = {"load": elsewhere(LOAD, first, newest, home="machine", token="hf_user")}
        answers["elsewhere"] = elsewhere(ELSEWHERE, home="elsewhere")
        answers["offline"] = elsewhere(OFFLINE, first, home="machine", token="hf_user", offline=True)
        yield Story(hub, work / "published", first, newest, output, answers)


@pytest.fixture(scope="module")
def expected(story: Story) -> torch.Tensor:
    """Return the package's outputs of the exported model."""
    with torch.no_grad():
        return DiffLlamaForCausalLM.from_pretrained(story.folder)(torch.arange(1, 14)[None]).logits


def test_documented_commands_publish_a_private_model(story: Story) -> None:
    repository = story.hub.repositories["user/name"]
    assert repository.private
    assert set(repository.files(story.first)) == {".gitattributes", *(file.name for file in story.folder.iterdir())}
    card = repository.files(story.first)["README.md"].decode()
    assert "| piqa | acc | 0.7500 | 0 |" in card
    assert "license: apache-2.0" in card
    assert "- user/data" in card
    assert "Ready to be published: path/to/hub-folder" in story.output
    assert "Uploading to the new private repository user/name" in story.output
    assert re.search(r"model\.safetensors +\d{3},\d{3}", story.output)
    assert [request for request in story.hub.requests if request.status == 501] == []


@pytest.mark.parametrize("name", ["readme", "newest", "pinned", "newer code", "snapshot"])
def test_process_without_the_package_computes_the_same_bits(name: str, story: Story, expected: torch.Tensor) -> None:
    assert torch.equal(story.answers["load"].tensors[name], expected)
    assert story.answers["load"].facts[name][0].startswith("transformers_modules.")


def test_commit_pins_code_and_weights_and_newer_code_runs_older_weights(story: Story) -> None:
    older = {name for name, (_, newer) in story.answers["load"].facts.items() if not newer}
    assert older == {"pinned"}
    files = {commit: story.hub.repositories["user/name"].files(commit) for commit in (story.first, story.newest)}
    differing = {name for name, content in files[story.first].items() if content != files[story.newest][name]}
    assert differing == {"differential_attention.py", "README.md"}


def test_fine_tune_in_another_repository_is_loaded_from_there_only(story: Story, expected: torch.Tensor) -> None:
    tuned, there = story.answers["load"].tensors["tuned"], story.answers["elsewhere"]
    assert not torch.equal(tuned, expected)
    assert torch.equal(there.tensors["tuned"], tuned)
    assert torch.equal(there.tensors["pipeline"], tuned)
    assert there.facts["tuned"][0].startswith("transformers_modules.user.tuned.")
    paths = [request.path for request in there.requests]
    assert sum("user/tuned" in path for path in paths) > 5
    assert not any("user/name" in path for path in paths)


def test_cache_has_both_commits_offline(story: Story, expected: torch.Tensor) -> None:
    offline = story.answers["offline"]
    assert offline.requests == []
    assert torch.equal(offline.tensors["newest"], expected)
    assert torch.equal(offline.tensors["pinned"], expected)
    assert (offline.facts["newest"][1], offline.facts["pinned"][1]) == (True, False)
