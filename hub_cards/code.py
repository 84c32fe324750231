# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The code of a Hub folder: which files it takes, whether the Hub's loader can follow them, where they come from."""

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
"""Names under which a file might import this package, which the Hub's machines do not have."""

INSTALLED = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
"""What every machine has that loads a model with transformers."""

_STAMP = re.compile(r"^# From diffllama (?P<version>\S+?)(?:, commit (?P<commit>[^\n]+))?\.\n", re.MULTILINE)


class HubCodeError(DiffLlamaError):
    """Code that the Hub's loader cannot follow. The message lists every fault, a line each.

    Attributes:
        faults: what is wrong, each with the file's name before it.
    """

    def __init__(self, folder: Path, faults: list[str]) -> None:
        super().__init__("\n  ".join((f"The Hub's loader cannot follow the code in {folder}:", *faults)))
        self.faults = faults


def hub_code(folder: Path = SOURCE, auto_map: Mapping[str, str] = AUTO_MAP) -> dict[str, str]:
    """The files that a Hub folder needs for its Auto classes, from the entry points on.

    The loader of transformers reads imports with regular expressions, understands `from .name import x` only, and
    loads every file from one folder.

    Args:
        folder: where the files are.
        auto_map: Auto class -> `file.Class`, as in config.json.

    Returns:
        File name -> text.

    Raises:
        HubCodeError: a file, class or import that the loader does not find, would misread, or that other machines lack.
    """
    entries: dict[str, list[str]] = {}
    faults = []
    for auto_class, reference in auto_map.items():
        module, _, name = str(reference).partition(".")
        if not (module.isidentifier() and name.isidentifier()):
            faults.append(f"auto_map: {auto_class} must be a file.Class of this folder, got {reference!r}")
        else:
            entries.setdefault(module, []).append(name)
    code: dict[str, str] = {}
    ahead = list(entries)
    while ahead:
        name = ahead.pop(0)
        path = folder / f"{name}.py"
        if path.name in code:
            continue
        if clashes := [other for other in code if other.lower() == path.name.lower()]:
            faults.append(f"{path.name}: on some machines it is the same file as {clashes[0]}")
        if (folder / name).is_dir():
            faults.append(f"{path.name}: there is a folder of the same name")
        try:
            code[path.name] = path.read_text(encoding="utf-8")
            tree = ast.parse(code[path.name])
        except (OSError, ValueError, SyntaxError) as error:
            faults.append(f"{path.name}: {error}")
            continue
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value) in classes:  # another name
                classes |= {ast.unparse(target) for target in node.targets}
        faults += [f"{path.name}: has no class {each}" for each in entries.get(name, ()) if each not in classes]
        statements = relative_imports(tree)
        relative, read = {name for name, wrong in statements.items() if not wrong}, set(get_relative_imports(path))
        more = [wrong for wrong in statements.values() if wrong]
        more += [
            f"the loader would take a line of text for an import of .{name}" for name in sorted(read - set(statements))
        ]
        more += [f"the loader does not see the import of .{name}" for name in sorted(relative - read)]
        more += unknown_imports(tree, path)
        faults += [f"{path.name}: {fault}" for fault in more]
        ahead += sorted(relative)
    if faults:
        raise HubCodeError(folder, faults)
    return code


@cache
def package_code() -> dict[str, str]:
    """The package's own code, see `hub_code`."""
    return hub_code()


def is_package_code(folder: Path) -> bool:
    """Whether a folder has the package's code, unchanged; it may have other Python files too."""
    try:
        return all(
            unstamped((folder / name).read_text(encoding="utf-8"))[0] == text
            and not (folder / name).with_suffix("").exists()
            for name, text in package_code().items()
        )
    except (OSError, UnicodeDecodeError):
        return False


def relative_imports(tree: ast.AST) -> dict[str, str | None]:
    """What a piece of code imports relatively, without the first dot -> what is wrong with it, if the loader fails."""
    found: dict[str, str | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            name = "." * (node.level - 1) + (node.module or "")
            statement = f"from .{name} import {', '.join(alias.name for alias in node.names)}"
            right = "from .file import name"
            found[name] = (
                None if name.isidentifier() else f"line {node.lineno}: `{statement}` must have the form `{right}`"
            )
    return found


def unknown_imports(tree: ast.AST, path: Path) -> list[str]:
    """Imports of this package, wherever they stand, and unguarded ones of packages that other machines may lack."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            found.setdefault(name.partition(".")[0], node.lineno)
    faults = [f"line {line}: imports {name}, which is not on the Hub" for name, line in found.items() if name in OURS]
    lacking = set(get_imports(path)) - INSTALLED - set(OURS)  # without those in `try` and `if is_x_available()`
    return faults + [
        f"line {found[name]}: imports {name}, which other machines may lack: import it within `try`"
        for name in sorted(lacking)
    ]


def stamped(text: str) -> str:
    """A file's text with a line behind its licence header that says which version and commit it is."""
    lines = text.splitlines(keepends=True)
    header = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    made = f", commit {commit()}" if commit() else ""
    return "".join((*lines[:header], f"# From diffllama {VERSION}{made}.\n", *lines[header:]))


def unstamped(text: str) -> tuple[str, str | None]:
    """A file's text without the line that `stamped` put there, and what it says, such as "0.1.0, commit 0123"."""
    match = _STAMP.search(text)
    if match is None:
        return text, None
    said = match["version"] + (f", commit {match['commit']}" if match["commit"] else "")
    return text[: match.start()] + text[match.end() :], said


def code_licence(folder: Path) -> str:
    """The name of the file with the licence of the code: LICENSE, or LICENSE-CODE if the model has another licence."""
    file = folder / "LICENSE"
    return "LICENSE-CODE" if file.is_file() and not is_code_licence(file) else "LICENSE"


def write_code(folder: Path) -> None:
    """Writes the package's code and its licence into a folder."""
    for name, text in package_code().items():
        (folder / name).write_text(stamped(text), encoding="utf-8", newline="\n")
    (folder / code_licence(folder)).write_text(licence(), encoding="utf-8", newline="\n")


def differences(code: Mapping[str, str]) -> dict[str, str]:
    """How code differs from the package's: file -> what is different. Empty if it does not."""
    ours, different = package_code(), {}
    for name in sorted(code.keys() | ours.keys()):
        if name not in code:
            different[name] = f"is missing; diffllama {VERSION} has it"
            continue
        text, said = unstamped(code[name])
        if name not in ours:
            different[name] = f"is not in diffllama {VERSION}"
        elif text != ours[name]:
            changes = list(difflib.unified_diff(ours[name].splitlines(), text.splitlines(), n=0, lineterm=""))[2:]
            added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
            origin = f"from diffllama {said}" if said else "of unknown version"
            different[name] = f"is not that of diffllama {VERSION} but {origin}: +{added} -{removed} lines"
    return different
