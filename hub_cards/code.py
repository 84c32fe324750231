# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The code of a Hub folder: its files, their version, and whether transformers can load them from the Hub."""

import ast
import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from transformers.dynamic_module_utils import get_imports, get_relative_imports

from diffllama.checkpoints.versions import SOURCE, VERSION, commit, is_code_licence, licence
from diffllama.modeling_diff.configuration_diffllama import AUTO_MAP


OURS = ("diffllama", "modeling_diff", "configuration", "conversion", "hub_cards")
"""Names of this package in imports. Other machines do not have it."""

INSTALLED = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
"""Modules that are installed with transformers."""

_VERSION_LINE = re.compile(r"^# From diffllama (?P<version>\S+?)(?:, commit (?P<commit>[^\n]+))?\.\n", re.MULTILINE)


@cache
def package_code() -> dict[str, str]:
    """Return the files of the package that every Hub folder has: name -> text."""
    return {file.name: file.read_text(encoding="utf-8") for file in SOURCE.glob("*.py") if file.name != "__init__.py"}


def folder_code(folder: Path) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Find the files that a Hub folder needs for the classes of `AUTO_MAP`, by following their imports.

    transformers' loader reads imports with regular expressions, understands only `from .name import x`, and loads all
    files from one folder.

    Returns:
        File name -> text; and pairs of a file and a fault: it or a class is missing, the loader would miss or misread
        an import, or other machines lack an imported module.
    """
    entry_points: dict[str, list[str]] = {}
    for reference in AUTO_MAP.values():
        module, _, name = reference.partition(".")
        entry_points.setdefault(module, []).append(name)
    code: dict[str, str] = {}
    faults: list[tuple[str, str]] = []
    pending = list(entry_points)
    while pending:
        module = pending.pop(0)
        path = folder / f"{module}.py"
        if path.name in code:
            continue
        if clashes := [other for other in code if other.lower() == path.name.lower()]:
            faults.append((path.name, f"on some machines it is the same file as {clashes[0]}"))
        if (folder / module).is_dir():
            faults.append((path.name, "there is a folder of the same name"))
        try:
            code[path.name] = path.read_text(encoding="utf-8")
            tree = ast.parse(code[path.name])
        except (OSError, ValueError, SyntaxError) as error:
            missing_file = isinstance(error, FileNotFoundError)
            faults.append((path.name, "is missing: `diffllama export` writes it" if missing_file else str(error)))
            continue
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        missing = [f"has no class {name}" for name in entry_points.get(module, ()) if name not in classes]
        modules, import_faults = relative_imports(tree, path)
        faults += [(path.name, fault) for fault in (*missing, *import_faults, *absolute_import_faults(tree, path))]
        pending += modules
    return code, faults


def relative_imports(tree: ast.AST, path: Path) -> tuple[list[str], list[str]]:
    """Return the modules that a file imports relatively, and the faults that prevent the loader from following it."""
    modules: set[str] = set()
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            name = "." * (node.level - 1) + (node.module or "")
            modules.add(name)
            if not name.isidentifier():
                statement = f"from .{name} import {', '.join(alias.name for alias in node.names)}"
                faults.append(f"line {node.lineno}: `{statement}` must have the form `from .file import name`")
    seen, followed = set(get_relative_imports(path)), sorted(filter(str.isidentifier, modules))
    faults += [f"the loader takes a line of text for an import of .{name}" for name in sorted(seen - modules)]
    faults += [f"the loader does not see the import of .{name}" for name in followed if name not in seen]
    return followed, faults


def absolute_import_faults(tree: ast.AST, path: Path) -> Iterator[str]:
    """Yield a fault for each import of this package, and of a module that other machines may lack."""
    unprotected = set(get_imports(path)) - INSTALLED  # without those in `try` and `if is_x_available()`
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
    for name, line in lines.items():
        if name in OURS:
            yield f"line {line}: imports {name}, which is not on the Hub"
        elif name in unprotected:
            yield f"line {line}: imports {name}, which other machines may lack: import it within `try`"


def add_version_line(text: str) -> str:
    """Add a line with the package's version and commit after the licence header of a file's text."""
    lines = text.splitlines(keepends=True)
    header = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    suffix = f", commit {commit()}" if commit() else ""
    return "".join((*lines[:header], f"# From diffllama {VERSION}{suffix}.\n", *lines[header:]))


def split_version_line(text: str) -> tuple[str, str | None]:
    """Split a file's text into the text without the line of `add_version_line`, and that line's version and commit."""
    match = _VERSION_LINE.search(text)
    if match is None:
        return text, None
    version = match["version"] + (f", commit {match['commit']}" if match["commit"] else "")
    return text[: match.start()] + text[match.end() :], version


def code_licence(folder: Path) -> str:
    """Return the file for the licence of the code: LICENSE, or LICENSE-CODE if the model has its own licence."""
    file = folder / "LICENSE"
    return "LICENSE-CODE" if file.is_file() and not is_code_licence(file) else "LICENSE"


def write_code(folder: Path) -> None:
    """Write the package's code and its licence into a folder."""
    for name, text in package_code().items():
        (folder / name).write_text(add_version_line(text), encoding="utf-8", newline="\n")
    (folder / code_licence(folder)).write_text(licence(), encoding="utf-8", newline="\n")


def code_differences(code: Mapping[str, str]) -> dict[str, str]:
    """Compare code with the package's: file -> difference. Empty if there is none."""
    ours, differences = package_code(), {}
    for name in sorted(code.keys() | ours.keys()):
        text, version = split_version_line(code.get(name, ""))
        if name not in code:
            differences[name] = f"is missing; diffllama {VERSION} has it"
        elif name not in ours:
            differences[name] = f"is not in diffllama {VERSION}"
        elif text != ours[name]:
            changes = list(difflib.unified_diff(ours[name].splitlines(), text.splitlines(), n=0, lineterm=""))[2:]
            added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
            origin = f"from diffllama {version}" if version else "of unknown version"
            differences[name] = f"differs from diffllama {VERSION}; it is {origin}: +{added} -{removed} lines"
    return differences
