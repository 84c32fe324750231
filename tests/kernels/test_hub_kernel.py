"""The kernels as a repository of the Hub, loaded by the library `kernels` without this package, and by transformers."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from packaging.version import Version

from support import subprocess_runner
from support.attention_masks import batch
from support.tiny_models import VARIANTS, tiny_model, tokens


LIBRARY = Path(sys.prefix, "kernels")
"""Where the Makefile installs the library `kernels`: older versions of transformers cannot be imported beside it."""

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "kernels" / "write_repository.py"
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the script reads TOML, which Python 3.10 does not")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The library `kernels`, not this repository's folder."""
    if not LIBRARY.is_dir():
        pytest.skip(f"needs the library kernels in {LIBRARY}")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(LIBRARY)
        patch.setattr(inspect, "_filesbymodname", {})  # it maps the file to pytest's package of that name
        yield importlib.import_module("kernels")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository that the make target writes."""
    dest = tmp_path_factory.mktemp("kernels") / "diff-attention"
    subprocess.run([sys.executable, str(SCRIPT), str(dest)], check=True)
    return dest


def test_layout_is_that_of_a_hub_kernel(repository: Path) -> None:
    code = {"__init__.py", "cpu.py", "triton.py"}
    files = {path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file()}
    builds = {f"build/torch-{name}/{file}" for name in ("cpu", "cuda") for file in (*code, "metadata.json")}
    assert files == {"LICENSE", "README.md", "build.toml"} | builds | {f"torch-ext/diff_attention/{f}" for f in code}
    for file in repository.glob("build/*/*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        assert {name.partition(".")[0] for name in modules} <= {"torch", "triton", *sys.stdlib_module_names}


def test_existing_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"{tmp_path} already exists. Name another folder, or remove it.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


LOAD = """
import sys
from pathlib import Path

sys.modules["diffllama"] = sys.modules["transformers"] = None  # importing either fails
sys.path[:0] = sys.argv[2:]
import torch
from kernels import get_local_kernel
from support.padded_queries import padding
from support.reference import joined_attention

kernel = get_local_kernel(Path(sys.argv[1]))
draw = torch.Generator().manual_seed(0)


def error(variant, dtype, r):
    map_dim, padded = 16 if variant == "v1" else 32, padding(2 * r + 2, 32, r)
    shapes = (1, 2 * r + 2, 13, 32), (1, 1, 13, 32), (1, 1, 13, 32), (1,) if variant == "v1" else (1, 13, 2 * r, 1)
    given = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    if variant == "v1":
        given[0].masked_fill_(padded, 0)
    inputs = [tensor.to(dtype).requires_grad_() for tensor in given]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = joined_attention(*exact, None, map_dim**-0.5, r)
    output = kernel.diff_attention(*inputs, map_dim=map_dim, signals_per_noise=r)
    weights = torch.randn(truth.shape, dtype=torch.float64, generator=draw)
    expected = [truth, *torch.autograd.grad((truth * weights).sum(), exact)]
    found = [output, *torch.autograd.grad((output * weights).sum(), inputs)]
    if variant == "v1":  # nobody reads the gradient of the padding
        for gradient in (expected[1], found[1]):
            gradient.masked_fill_(padded, 0)
    return max(((ours - true).norm() / true.norm()).item() for ours, true in zip(found, expected))


cases = [("v1", 1), ("v2", 1), ("v1", 4)]
facts["cpu"] = [error(variant, torch.float64, r) for variant, r in cases]
if kernel.HAS_TRITON:
    kernel.runs_triton, kernel.supports_blocked = lambda device: True, lambda *call: False
    facts["triton"] = [error(variant, torch.float32, r) for variant, r in cases]
"""


@pytest.mark.slow
def test_kernel_gives_the_truth_without_this_package(repository: Path, kernels: ModuleType) -> None:
    code = re.search(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    assert code is not None
    example = code[1].replace("PATH_OF_THIS_FOLDER", str(repository)) + "\nassert output.shape == (1, 16, 4, 64)\n"
    paths = repository, LIBRARY, ROOT / "tests"
    errors, _ = subprocess_runner.run(LOAD + example, *paths, environment=os.environ | {"TRITON_INTERPRET": "1"})
    assert max(errors["cpu"]) < 1e-12
    if importlib.util.find_spec("triton"):
        assert max(errors["triton"]) < 1e-5


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="transformers loads other kernels then")
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_takes_it_as_attn_implementation(
    variant: str, repository: Path, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download and transformers' version check of the library `kernels` are left out."""
    from transformers.integrations import hub_kernels

    def get_local(name: str, **kwargs: object) -> ModuleType:
        assert name == "owner/diff-attention"
        return kernels.get_local_kernel(repository)

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_local)
    model, given = tiny_model(variant), batch("left", 9)
    logits = []
    for implementation in ("owner/diff-attention", "eager"):
        model.set_attn_implementation(implementation, allow_all_kernels=True)
        assert model.config._attn_implementation == implementation
        logits.append(model(tokens(2, 9), attention_mask=given.attention_mask).logits[given.real])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
