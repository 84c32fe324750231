"""CITATION.cff has the fields that the Citation File Format 1.2.0 requires, this version, and the paper."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import diffllama


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def citation() -> dict[str, Any]:
    # dates and versions remain strings
    return yaml.load((ROOT / "CITATION.cff").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def test_required_fields_of_the_format(citation: dict[str, Any]) -> None:
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["message"]
    assert citation["title"]
    assert citation["authors"] == [{"name": "The diffllama authors"}]  # only an entity has `name`
    for reference in citation["references"]:
        assert reference["type"] in ("article", "conference-paper")
        assert reference["title"]
        assert all(set(person) == {"given-names", "family-names"} for person in reference["authors"])


def test_fields_are_those_of_the_format(citation: dict[str, Any]) -> None:
    known = {
        "cff-version", "message", "type", "title", "abstract", "authors", "version", "license", "keywords", "references"
    }  # fmt: skip
    assert set(citation) <= known, "and no URL: the repository has no public place"
    for reference in citation["references"]:
        assert set(reference) <= {"type", "title", "authors", "year", "conference", "identifiers", "url"}


def test_version_and_licence_are_the_packages(citation: dict[str, Any]) -> None:
    assert citation["version"] == diffllama.__version__
    assert f'\nlicense = "{citation["license"]}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_paper_is_the_one_that_the_readme_cites(citation: dict[str, Any]) -> None:
    (paper,) = citation["references"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    authors = " and ".join(f"{person['given-names']} {person['family-names']}" for person in paper["authors"])
    fields = {"title": paper["title"], "author": authors, "year": paper["year"], "url": paper["url"]}
    assert [field for field, value in fields.items() if f"{field:<9} = {{{value}}}" not in readme] == []
    assert [entry["value"] for entry in paper["identifiers"]] == ["arXiv:2410.05258"]
