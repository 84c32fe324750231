# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The code of a Hub folder: its files, whether transformers can load them from the Hub, and where they come from."""

import ast
import difflib
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from transformers.dynamic_module_utils import get_imports, get_relative_imports

from diffllama.checkpoints.errors import DiffLlamaError
from diffllama.checkpoints.versions import SOURCE, VERSION, commit, is_code_licence, licence
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP


OURS = ("diffllama", "modeling_diff", "configuration", "conversion", "hub_cards")
"""Names by which a file might import this package, which other machines do not have."""

INSTALLED = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
"""Modules that every machine with transformers has."""

_VERSION_LINE = re.compile(r"^# From diffllama (?P<version>\S+?)(?:, commit (?P<commit>[^\n]+))?\.\n", re.MULTILINE)


class HubCodeError(DiffLlamaError):
    """Code that transformers cannot load from the Hub. The message lists every fault, one per line.

    Attributes:
        faults: the faults, each with the file's name in front.
    """

    def __init__(self, folder: Path, faults: list[str]) -> None:
        super().__init__("\n  ".join((f"transformers cannot load the code in {folder} from the Hub:", *faults)))
        self.faults = faults


def hub_code(folder: Path = SOURCE, auto_map: Mapping[str, str] = AUTO_MAP) -> dict[str, str]:
    """The files that a Hub folder needs for its Auto classes, found by following their imports.

    transformers' loader reads imports with regular expressions, understands only `from .name import x`, and loads all
    files from one folder.

    Args:
        folder: where the files are.
        auto_map: Auto class -> `file.Class`, as in config.json.

    Returns:
        File name -> text.

    Raises:
        HubCodeError: a file or class is missing, the loader would miss or misread an import, or other machines lack
            an imported module.
    """
    entry_points: dict[str, list[str]] = {}
    faults = []
    for auto_class, reference in auto_map.items():
        module, _, name = str(reference).partition(".")
        if not (module.isidentifier() and name.isidentifier()):
            faults.append(f"auto_map: {auto_class} must be a file.Class of this folder, got {reference!r}")
        else:
            entry_points.setdefault(module, []).append(name)
    code: dict[str, str] = {}
    pending = list(entry_points)
    while pending:
        module = pending.pop(0)
        path = folder / f"{module}.py"
        if path.name in code:
            continue
        if clashes := [other for other in code if other.lower() == path.name.lower()]:
            faults.append(f"{path.name}: on some machines it is the same file as {clashes[0]}")
        if (folder / module).is_dir():
            faults.append(f"{path.name}: there is a folder of the same name")
        try:
            code[path.name] = path.read_text(encoding="utf-8")
            tree = ast.parse(code[path.name])
        except (OSError, ValueError, SyntaxError) as error:
            faults.append(f"{path.name}: {error}")
            continue
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value) in classes:  # an alias
                classes |= {ast.unparse(target) for target in node.targets}
        missing = [f"has no class {name}" for name in entry_points.get(module, ()) if name not in classes]
        modules, import_faults = relative_imports(tree, path)
        import_faults += absolute_import_faults(tree, path)
        faults += [f"{path.name}: {fault}" for fault in missing + import_faults]
        pending += modules
    if faults:
        raise HubCodeError(folder, faults)
    return code


@cache
def package_code() -> dict[str, str]:
    """The package's code, see `hub_code`."""
    return hub_code()


def is_package_code(folder: Path) -> bool:
    """Whether a folder has the package's code, unchanged. It may have other Python files too."""
    try:
        return all(
            split_version_line((folder / name).read_text(encoding="utf-8"))[0] == text
            and not (folder / name).with_suffix("").exists()
            for name, text in package_code().items()
        )
    except (OSError, UnicodeDecodeError):
        return False


def relative_imports(tree: ast.AST, path: Path) -> tuple[list[str], list[str]]:
    """The modules that a file imports relatively, and the faults that keep the loader from following it."""
    statements: dict[str, int] = {}
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            name = "." * (node.level - 1) + (node.module or "")
            statements[name] = node.lineno
            if not name.isidentifier():
                statement = f"from .{name} import {', '.join(alias.name for alias in node.names)}"
                faults.append(f"line {node.lineno}: `{statement}` must have the form `from .file import name`")
    modules, seen = {name for name in statements if name.isidentifier()}, set(get_relative_imports(path))
    faults += [f"the loader takes a line of text for an import of .{name}" for name in sorted(seen - set(statements))]
    faults += [f"the loader does not see the import of .{name}" for name in sorted(modules - seen)]
    return sorted(modules), faults


def absolute_import_faults(tree: ast.AST, path: Path) -> list[str]:
    """The imports of this package, and of modules that other machines may lack."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            lines.setdefault(name.partition(".")[0], node.lineno)
    missing = set(get_imports(path)) - INSTALLED - set(OURS)  # without those in `try` and `if is_x_available()`
    return [
        *(f"line {line}: imports {name}, which is not on the Hub" for name, line in lines.items() if name in OURS),
        *(f"line {lines[name]}: imports {name}, which other machines may lack: import it within `try`"
          for name in sorted(missing)),
    ]  # fmt: skip


def add_version_line(text: str) -> str:
    """A file's text with the package's version and commit in a line after the licence header."""
    lines = text.splitlines(keepends=True)
    header = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    suffix = f", commit {commit()}" if commit() else ""
    return "".join((*lines[:header], f"# From diffllama {VERSION}{suffix}.\n", *lines[header:]))


def split_version_line(text: str) -> tuple[str, str | None]:
    """A file's text without the line of `add_version_line`, and its content, such as "0.1.0, commit 0123"."""
    match = _VERSION_LINE.search(text)
    if match is None:
        return text, None
    version = match["version"] + (f", commit {match['commit']}" if match["commit"] else "")
    return text[: match.start()] + text[match.end() :], version


def code_licence(folder: Path) -> str:
    """The file for the licence of the code: LICENSE, or LICENSE-CODE if the model has a licence of its own."""
    file = folder / "LICENSE"
    return "LICENSE-CODE" if file.is_file() and not is_code_licence(file) else "LICENSE"


def write_code(folder: Path) -> None:
    """Writes the package's code and its licence into a folder."""
    for name, text in package_code().items():
        (folder / name).write_text(add_version_line(text), encoding="utf-8", newline="\n")
    (folder / code_licence(folder)).write_text(licence(), encoding="utf-8", newline="\n")


def code_differences(code: Mapping[str, str]) -> dict[str, str]:
    """How code differs from the package's: file -> difference. Empty if it does not."""
    ours, differences = package_code(), {}
    for name in sorted(code.keys() | ours.keys()):
        if name not in code:
            differences[name] = f"is missing; diffllama {VERSION} has it"
            continue
        text, version = split_version_line(code[name])
        if name not in ours:
            differences[name] = f"is not in diffllama {VERSION}"
        elif text != ours[name]:
            changes = list(difflib.unified_diff(ours[name].splitlines(), text.splitlines(), n=0, lineterm=""))[2:]
            added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
            origin = f"from diffllama {version}" if version else "of unknown version"
            differences[name] = f"differs from diffllama {VERSION}; it is {origin}: +{added} -{removed} lines"
    return differences
