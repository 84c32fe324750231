"""Continuous integration tests the supported versions."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml


ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    file = ROOT / ".github/workflows/ci.yml"
    return yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # `on` and versions remain strings


def test_pushes_and_pull_requests_run_every_job(workflow: dict[str, Any]) -> None:
    assert workflow["on"] == ["push", "pull_request"]
    for job in workflow["jobs"].values():
        assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run ${{ matrix.versions }}"]
        assert "if" not in job
        assert "continue-on-error" not in job


def test_matrix_has_the_oldest_and_the_newest_versions(workflow: dict[str, Any]) -> None:
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert matrix == {"python": ["3.10", "3.13"], "versions": ["newest", "oldest"]}
    (oldest,) = re.findall(r'^requires-python = ">=(.*)"$', PYPROJECT, re.MULTILINE)
    assert matrix["python"][0] == oldest


def test_each_job_makes_its_environment_with_the_python_of_the_matrix(workflow: dict[str, Any]) -> None:
    for job in workflow["jobs"].values():
        (setup,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python@")]
        assert setup["with"]["python-version"] == "${{ matrix.python }}"
        assert job["steps"][-1]["env"]["PYTHON"] == "python${{ matrix.python }}"
    assert re.search(r"^PYTHON \?=", MAKEFILE, re.MULTILINE), "make takes it from the environment"


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_oldest_versions_are_the_lower_bounds_of_the_package(package: str) -> None:
    (line,) = re.findall(r"^OLDEST_VERSIONS := (.*)$", MAKEFILE, re.MULTILINE)
    (bound,) = re.findall(rf'^    "{package}>=([0-9.]+)', PYPROJECT, re.MULTILINE)
    assert f"{package}=={bound}.0 " in line


@pytest.mark.parametrize(
    ("arguments", "tests"),
    [([], ["test", "test-oldest"]), (["newest"], ["test"]), (["oldest"], ["test-oldest"])],
    ids=["both", "newest", "oldest"],
)
def test_script_tests_the_versions_asked_for(arguments: list[str], tests: list[str], tmp_path: Path) -> None:
    make = tmp_path / "make"  # a stub that records its arguments
    make.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    make.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([ROOT / ".ci/run", *arguments], env=environment, check=True, capture_output=True)
    calls = [call.split() for call in (tmp_path / "calls").read_text().splitlines()]
    assert [call[0] for call in calls if call[0].startswith("test")] == tests
    checks = {"lint", "types", "test-transformers", "test-versions", "check-wheel"}
    assert checks <= {word for call in calls for word in call} or arguments == ["oldest"]


def test_script_refuses_other_versions() -> None:
    result = subprocess.run([ROOT / ".ci/run", "latest"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "Usage: .ci/run [newest|oldest], got latest\n")
