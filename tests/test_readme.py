"""README.md is short, and its targets and links exist. tests/docs runs its commands and code."""

import re
import subprocess
from pathlib import Path

import yaml

from support.markdown import ROOT, blocks


TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO = Path("demo/SmolLM2-135M-Instruct-Diff")


def test_readme_has_at_most_160_lines() -> None:
    assert len(TEXT.splitlines()) <= 160


def test_links_lead_to_files_and_headings() -> None:
    links = re.findall(r"\]\((?!https://)([^)#]+)(?:#([^)]+))?\)", TEXT)
    assert len(links) >= 12
    for name, heading in links:
        assert (ROOT / name).is_file(), name
        if heading:
            headings = re.findall(r"(?m)^#+ (.*)$", (ROOT / name).read_text(encoding="utf-8"))
            assert heading in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}


def test_every_make_target_that_the_text_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", TEXT))
    assert named >= {"demo", "test", "docs"}
    assert named <= targets


def test_continuous_integration_runs_the_readmes_test_command_and_builds_the_documentation() -> None:
    ci = (ROOT / ".ci/run").read_text()
    assert "\nmake test\n" in ci
    assert "make test " in blocks(ROOT / "README.md", "sh")[0].text
    assert " docs " in next(line for line in ci.splitlines() if "make -j" in line)


def test_make_clean_keeps_what_the_examples_train() -> None:
    words = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    removed = {Path(word) for word in words if not word.startswith("-")}
    assert removed >= {Path("build"), DEMO}
    for file in (ROOT / "examples").glob("*.yaml"):
        output = Path(yaml.safe_load(file.read_text())["training"]["output_dir"])
        assert not removed & {output, *output.parents}, file
