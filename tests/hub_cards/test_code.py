from pathlib import Path

import pytest

from diffllama import __version__
from diffllama.hub_cards import code
from diffllama.hub_cards.code import (
    HubCodeError,
    add_version_line,
    code_differences,
    code_licence,
    hub_code,
    split_version_line,
    write_code,
)


HEADER = "# Copyright 2026 The diffllama authors.\n# SPDX-License-Identifier: Apache-2.0\n"
AUTO_MAP = {"AutoModel": "model.Model"}


def faults(folder: Path, files: dict[str, str], auto_map: dict[str, str] = AUTO_MAP) -> str:
    """Writes a folder of code. Returns what cannot be followed in it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(HubCodeError) as error:
        hub_code(folder, auto_map)
    title, *lines = str(error.value).splitlines()
    assert str(folder) in title
    assert all(line.startswith("  ") for line in lines)
    return "\n".join(line.strip() for line in lines)


def test_code_of_the_package_is_all_of_its_files() -> None:
    assert set(hub_code()) == {file.name for file in code.SOURCE.glob("*.py")} - {"__init__.py"}


def test_imports_are_followed_from_the_entry_points(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from .a import x\n\nclass Model: ...\n")
    (tmp_path / "a.py").write_text("def f():\n    from .b import y\n")
    (tmp_path / "b.py").write_text("from .a import f  # in a circle\n")
    (tmp_path / "unused.py").write_text("import diffllama\n")
    assert list(hub_code(tmp_path, AUTO_MAP)) == ["model.py", "a.py", "b.py"]


@pytest.mark.parametrize(
    ("line", "fault"),
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
        ("from .missing import x", "missing.py: [Errno 2] No such file"),
        ("x = 1; from .a import y", "model.py: the loader does not see the import of .a"),
        ('"""\nfrom .a import x\n"""', "model.py: the loader takes a line of text for an import of .a"),
        ("'''\nimport .a\n'''", "model.py: the loader takes a line of text for an import of .a"),
        ("def broken(:", "model.py: invalid syntax"),
    ],
)
def test_unloadable_import_is_named_with_file_and_line(line: str, fault: str, tmp_path: Path) -> None:
    message = faults(tmp_path, {"model.py": f"{line}\n\nclass Model: ...\n", "a.py": ""})
    assert message.startswith(fault)


def test_ambiguous_file_names_are_refused(tmp_path: Path) -> None:
    model = "from .kernel import f\nfrom .Kernel import g\n\nclass Model: ...\n"
    message = faults(tmp_path, {"model.py": model, "kernel.py": "", "Kernel.py": ""})
    assert "is the same file as" in message
    assert faults(tmp_path, {"model.py": "from .kernel import f\n\nclass Model: ...\n", "kernel/__init__.py": ""}) == (
        "kernel.py: there is a folder of the same name"
    )


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("model.Other", "model.py: has no class Other"),
        ("owner/name--model.Model", "auto_map: AutoModel must be a file.Class of this folder, got 'owner/name--model"),
        ("../model.Model", "auto_map: AutoModel must be a file.Class"),
        ("model", "auto_map: AutoModel must be a file.Class"),
    ],
)
def test_entry_point_must_be_a_class_of_the_folder(reference: str, fault: str, tmp_path: Path) -> None:
    assert faults(tmp_path, {"model.py": "class Model: ...\n"}, {"AutoModel": reference}).startswith(fault)


def test_all_faults_are_listed(tmp_path: Path) -> None:
    message = faults(
        tmp_path, {"model.py": "import triton\nfrom ..a import x\nfrom .b import y\n", "b.py": "import flax"}
    )
    assert len(message.splitlines()) == 4


class TestVersionLine:
    def test_line_follows_the_licence_and_has_version_and_commit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(code, "commit", lambda: "0123abcd")
        text = f'{HEADER}"""Docstring."""\n\nx = 1\n'
        line = f"# From diffllama {__version__}, commit 0123abcd.\n"
        assert add_version_line(text) == f'{HEADER}{line}"""Docstring."""\n\nx = 1\n'
        assert split_version_line(add_version_line(text)) == (text, f"{__version__}, commit 0123abcd")

    def test_unknown_commit_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(code, "commit", lambda: None)
        assert add_version_line(HEADER) == f"{HEADER}# From diffllama {__version__}.\n"
        assert split_version_line(add_version_line(HEADER)) == (HEADER, __version__)

    def test_text_without_the_line_stays(self) -> None:
        assert split_version_line(f"{HEADER}x = 1\n") == (f"{HEADER}x = 1\n", None)


class TestFolder:
    def test_written_code_is_that_of_the_package(self, tmp_path: Path) -> None:
        write_code(tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {*hub_code(), "LICENSE"}
        assert "Apache License" in (tmp_path / "LICENSE").read_text()
        assert all((tmp_path / name).read_text().startswith("# Copyright") for name in hub_code())
        assert code_differences(hub_code(tmp_path)) == {}

    def test_licence_of_the_model_stays(self, tmp_path: Path) -> None:
        (tmp_path / "LICENSE").write_text("Only for llamas.")
        write_code(tmp_path)
        assert (tmp_path / "LICENSE").read_text() == "Only for llamas."
        assert code_licence(tmp_path) == "LICENSE-CODE"
        assert "Apache License" in (tmp_path / "LICENSE-CODE").read_text()

    def test_differences_name_file_and_origin(self, tmp_path: Path) -> None:
        ours = {name: add_version_line(text) for name, text in hub_code().items()}
        name = "differential_attention.py"
        assert code_differences(ours) == {}
        assert code_differences(hub_code()) == {}
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
