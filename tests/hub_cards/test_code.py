from pathlib import Path

import pytest

from diffllama import __version__
from diffllama.hub_cards import code
from diffllama.hub_cards.code import (
    add_version_line,
    code_differences,
    code_licence,
    folder_code,
    package_code,
    split_version_line,
    write_code,
)


HEADER = "# Copyright 2026 The diffllama authors.\n# SPDX-License-Identifier: Apache-2.0\n"
MODEL = "\n\nclass Model: ...\n"


@pytest.fixture
def one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Require only the class Model in model.py."""
    monkeypatch.setattr(code, "AUTO_MAP", {"AutoModel": "model.Model"})


def read(folder: Path, **files: str) -> tuple[dict[str, str], list[str]]:
    """Write Python files. Returns the files found by imports, and the faults."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    found, faults = folder_code(folder)
    return found, [f"{file}: {fault}" for file, fault in faults]


def test_code_of_the_package_is_complete_and_loads_from_the_hub() -> None:
    assert folder_code(code.SOURCE) == (package_code(), [])


@pytest.mark.usefixtures("one_class")
def test_imports_are_followed_from_the_entry_points(tmp_path: Path) -> None:
    files = {
        "model": "from .a import x" + MODEL,
        "a": "def f():\n    from .b import y\n",
        "b": "from .a import f  # in a circle\n",
    }
    assert read(tmp_path, **files, unused="import diffllama\n") == ({f"{name}.py": files[name] for name in files}, [])


@pytest.mark.usefixtures("one_class")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import diffllama", "model.py: line 1: imports diffllama, which is not on the Hub"),
        ("from diffllama.modeling_diff import x", "model.py: line 1: imports diffllama"),
        ("import configuration.presets", "model.py: line 1: imports configuration"),
        ("try:\n    import diffllama\nexcept ImportError: ...", "model.py: line 2: imports diffllama"),
        ("import triton", "model.py: line 1: imports triton, which other machines may lack"),
        ("from .. import x", "model.py: line 1: `from .. import x` must have the form"),
        ("from ..a import x", "model.py: line 1: `from ..a import x` must have the form"),
        ("from .a.b import x", "model.py: line 1: `from .a.b import x` must have the form"),
        ("from . import a", "model.py: line 1: `from . import a` must have the form"),
        ("from .missing import x", "missing.py: is missing: `diffllama export` writes it"),
        ("from .kernel import x", "kernel.py: there is a folder of the same name"),
        ("from .a import x\nfrom .A import x", "a.py: on some machines it is the same file as A.py"),
        ("x = 1; from .a import y", "model.py: the loader does not see the import of .a"),
        ('"""\nfrom .a import x\n"""', "model.py: the loader takes a line of text for an import of .a"),
        ("'''\nimport .a\n'''", "model.py: the loader takes a line of text for an import of .a"),
        ("def broken(:", "model.py: invalid syntax"),
    ],
)
def test_unloadable_import_is_named_with_file_and_line(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    _, faults = read(tmp_path, model=text + MODEL, a="", A="", kernel="")
    assert faults[0].startswith(fault)


@pytest.mark.usefixtures("one_class")
def test_all_faults_are_listed(tmp_path: Path) -> None:
    model = "import triton\nfrom ..a import x\nfrom .b import y\nclass Other: ...\n"
    files, faults = read(tmp_path, model=model, b="import flax")
    assert list(files) == ["model.py", "b.py"]
    assert faults[0] == "model.py: has no class Model"
    assert len(faults) == 4


@pytest.mark.parametrize("commit", ["0123abcd", None])
def test_version_line_follows_the_licence_header(commit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "commit", lambda: commit)
    text = f'{HEADER}"""Docstring."""\n\nx = 1\n'
    version = f"{__version__}, commit {commit}" if commit else __version__
    assert add_version_line(text) == f'{HEADER}# From diffllama {version}.\n"""Docstring."""\n\nx = 1\n'
    assert split_version_line(add_version_line(text)) == (text, version)
    assert split_version_line(text) == (text, None)


class TestFolder:
    def test_written_code_is_that_of_the_package(self, tmp_path: Path) -> None:
        write_code(tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {*package_code(), "LICENSE"}
        assert "Apache License" in (tmp_path / "LICENSE").read_text()
        assert all((tmp_path / name).read_text().startswith("# Copyright") for name in package_code())
        written, faults = folder_code(tmp_path)
        assert faults == []
        assert code_differences(written) == {}

    def test_licence_of_the_model_stays(self, tmp_path: Path) -> None:
        (tmp_path / "LICENSE").write_text("Only for llamas.")
        write_code(tmp_path)
        assert (tmp_path / "LICENSE").read_text() == "Only for llamas."
        assert code_licence(tmp_path) == "LICENSE-CODE"
        assert "Apache License" in (tmp_path / "LICENSE-CODE").read_text()

    def test_differences_name_file_and_origin(self) -> None:
        ours = {name: add_version_line(text) for name, text in package_code().items()}
        name = "differential_attention.py"
        changed = ours[name].replace("import torch\n", "import torch\nimport os\n", 1).rstrip().rsplit("\n", 1)[0]
        differences = code_differences(ours | {name: changed})
        assert differences.keys() == {name}
        assert differences[name].startswith(f"differs from diffllama {__version__}; it is from diffllama {__version__}")
        assert differences[name].endswith(": +1 -1 lines")
        del ours[name]
        assert code_differences(ours | {"extra.py": ""}) == {
            name: f"is missing; diffllama {__version__} has it",
            "extra.py": f"is not in diffllama {__version__}",
        }
