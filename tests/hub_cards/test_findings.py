"""`check`, `card`, `export` and `push` check their arguments before they import anything that takes time."""

import subprocess
import sys
from pathlib import Path


REFUSED = """
import sys
from diffllama.cli import main
for words in (
    ["check", "nowhere"],
    ["check", ".", "--allow", "README.md"],
    ["card", "nowhere"],
    ["export", "nowhere", "dest"],
    ["push", "nowhere", "me/model"],
    ["push", ".", "model"],
    ["push", ".", "me/model", "--create-pr", "--revision", "dev"],
):
    sys.argv = ["diffllama", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code == 1, words
    else:
        raise AssertionError(words)
assert not {"torch", "transformers", "huggingface_hub.hf_api"} & set(sys.modules)
"""


def test_wrong_arguments_are_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", REFUSED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["Error"] * 7
