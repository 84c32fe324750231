"""The fused kernels, compared with plain formulas in float64; without a GPU, in Triton's interpreter.

Everything that must not be read is NaN: the padded halves of V1's queries, keys and values that no query sees, their
neighbours in memory, and all memory that the kernels have yet to write.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import ModuleType

import pytest
import torch

from diffllama.kernels import triton as module
from diffllama.kernels.triton import split_count, triton_attention
from support import reference
from support.padded_queries import padding


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patched_once")]  # independent of transformers' version
needs_triton = pytest.mark.skipif(not module.HAS_TRITON, reason="needs triton: pip install triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")

KINDS = ("causal", "left", "right", "packed", "window", "static cache", "random", "nothing")
VARIANTS = ("v1", "v2")
NAMES = ("output", "query", "key", "value", "lambda")


def bounds(kind: str, n: int, m: int) -> torch.Tensor | None:
    """Return the intervals of keys that queries see, [2, 1, n, 2]. By default the last token sees all keys."""
    if kind == "causal":
        return None
    i = torch.arange(n).expand(2, n) + m - n
    start, end = torch.zeros_like(i), i + 1
    amounts = torch.tensor([[m // 3], [1]])
    if kind in ("left", "right"):  # intervals of padding: [0, 0) in the first text, [m, m) in the second
        padding = torch.tensor([[m - (2 * n + 2) // 3], [m - n + 1]])
        real, nothing = (i >= padding if kind == "left" else i < m - amounts), torch.tensor([[0], [m]])
        start = torch.where(real, padding if kind == "left" else 0, nothing)
        end = torch.where(real, end, nothing)
    elif kind == "packed":
        start = i // 17 * 17
    elif kind == "window":
        start = (end - torch.tensor([[5], [40]])).clamp(min=0)
    elif kind == "static cache":  # longer than its content
        end = (end - amounts).clamp(min=0)
    elif kind == "random":  # also empty intervals, and ones beyond the last key
        generator = torch.Generator().manual_seed(n)
        start, end = torch.randint(-9, m + 9, (2, 2, n), generator=generator)
    elif kind == "nothing":
        end = end * torch.tensor([[0], [1]])
    return torch.stack((start, end), dim=-1)[:, None].to(torch.int32)


@dataclass(frozen=True)
class Inputs:
    """Arguments of `triton_attention`, and the visible keys [2, m] and pairs [2, n, m]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    differential_lambda: torch.Tensor
    bounds: torch.Tensor | None
    map_dim: int
    r: int
    hull: torch.Tensor
    visible: torch.Tensor

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value, self.differential_lambda

    @property
    def options(self) -> tuple[int, float, int]:
        return self.map_dim, self.map_dim**-0.5, self.r


def inputs(
    variant: str, kind: str, *, n: int, m: int, width: int = 64, groups: int = 1, h_kv: int = 1, r: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Inputs:  # fmt: skip
    """Return two random texts, with groups of `r` signals and their noise.

    Queries and values are views of [b, n, heads, D], keys are the beginning of a longer cache.
    """
    generator = torch.Generator().manual_seed(n + m)
    query = torch.randn(2, n, groups * (r + 1), width, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    cache = torch.randn(2, h_kv, m + 9, width, generator=generator).to(DEVICE, dtype)
    value = torch.randn(2, m, h_kv, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    lam = torch.rand((1,) if variant == "v1" else (2, n, groups * r, 1), generator=generator).to(DEVICE) + 0.2
    map_dim = width
    if variant == "v1":
        map_dim = width // 2
        query.masked_fill_(padding(*query.shape[1::2], r).to(DEVICE), NAN)
    intervals, j = bounds(kind, n, m), torch.arange(m)
    visible = torch.ones(2, n, m, dtype=torch.bool).tril(m - n)
    if intervals is not None:
        visible = (j >= intervals[:, 0, :, :1]) & (j < intervals[:, 0, :, 1:])
    seen = visible.any(1)
    hull = (seen.cumsum(1) > 0) & (seen.flip(1).cumsum(1).flip(1) > 0)  # from the first to the last visible key
    cache[:, :, m:] = NAN
    for tensor in (cache[:, :, :m], value):
        tensor.transpose(1, 2)[~hull] = NAN
    return Inputs(
        *(x.requires_grad_() for x in (query, cache[:, :, :m], value, lam)),
        None if intervals is None else intervals.to(DEVICE),
        map_dim,
        r,
        hull.to(DEVICE),
        visible.to(DEVICE),
    )


def true_outputs(given: Inputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Compute output and gradients by the formulas, signal by signal, in `dtype`."""
    query, key, value, lam = (x.detach().to(dtype).requires_grad_() for x in given.differentiable)
    first, second = slice(given.map_dim), slice(query.shape[-1] - given.map_dim, None)  # halves in V1
    r, groups = given.r, query.shape[1] // (given.r + 1)
    rows = []
    for i in range(2):
        heads = []
        for group, signal in product(range(groups), range(r)):
            k, v = (x[i, group // (groups // x.shape[1])].where(given.hull[i, :, None], 0) for x in (key, value))
            queries = query[i, group * (r + 1) + signal, :, first], query[i, group * (r + 1) + r, :, second]
            map1 = reference.softmax_map(queries[0], k[:, first], given.visible[i])
            map2 = reference.softmax_map(queries[1], k[:, second], given.visible[i])
            heads.append((map1 - (lam if lam.dim() == 1 else lam[i, :, group * r + signal]) * map2) @ v)
        rows.append(torch.stack(heads, dim=1))
    return with_gradients(torch.stack(rows), (query, key, value, lam))


def kernel_outputs(given: Inputs) -> dict[str, torch.Tensor]:
    """Compute output and gradients by the kernels."""
    with nan_in_new_memory():
        output = triton_attention(*given.differentiable, given.bounds, *given.options)
        return with_gradients(output, given.differentiable)


def with_gradients(output: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output)
    gradients = torch.autograd.grad(output, leaves, direction)
    return dict(zip(NAMES, (output.detach(), *gradients), strict=True))


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill allocated memory with NaN, and refuse operations that are not deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def errors(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Compute max|ours - reference| / max|reference|, NaN if a value is not finite."""
    return {
        name: ((ours[name].double() - truth[name].double()).abs().max() / truth[name].double().abs().max()).item()
        for name in truth
    }


def exceeding(ours: dict[str, float], allowed: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (error, allowed[name]) for name, error in ours.items() if not error <= allowed[name]}


def assert_equal_to_the_formulas(given: Inputs) -> None:
    """Check the error: in float32 1e-5, in half precision at most twice that of plain PyTorch."""
    ours, truth = kernel_outputs(given), true_outputs(given, torch.float64)
    assert ours["output"].dtype == given.query.dtype
    if given.query.dtype == torch.float32:
        allowed = dict.fromkeys(truth, 1e-5)
    else:
        plain = errors(true_outputs(given, given.query.dtype), truth)
        allowed = {name: 2 * error for name, error in plain.items()}
    assert exceeding(errors(ours, truth), allowed) == {}, given.query.shape


# --- outputs and gradients ------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_every_gradient_equal_the_formulas(variant: str, kind: str) -> None:
    assert_equal_to_the_formulas(inputs(variant, kind, n=35, m=70))


@needs_triton
@pytest.mark.parametrize(("width", "groups", "h_kv"), [(128, 4, 2), (96, 3, 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_widths_and_groups_that_share_keys_equal_the_formulas(variant: str, width: int, groups: int, h_kv: int) -> None:
    assert_equal_to_the_formulas(inputs(variant, "left", n=27, m=34, width=width, groups=groups, h_kv=h_kv))


@needs_triton
@pytest.mark.parametrize(
    ("kind", "n", "groups", "h_kv", "r"),
    [("causal", 35, 1, 1, 2), ("random", 20, 2, 1, 3), ("left", 20, 2, 2, 4), ("causal", 1, 1, 1, 3)],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_several_signals_of_one_noise_equal_the_formulas(
    variant: str, kind: str, n: int, groups: int, h_kv: int, r: int
) -> None:
    assert_equal_to_the_formulas(inputs(variant, kind, n=n, m=2 * n, groups=groups, h_kv=h_kv, r=r))


@needs_triton
@pytest.mark.parametrize(("n", "m", "groups"), [(1, 40, 3), (64, 64, 1), (33, 97, 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_query_whole_blocks_and_one_more_equal_the_formulas(variant: str, n: int, m: int, groups: int) -> None:
    assert_equal_to_the_formulas(inputs(variant, "causal", n=n, m=m, groups=groups))


@needs_triton
@pytest.mark.parametrize(("variant", "kind", "r"), [("v1", "random", 1), ("v2", "causal", 1), ("v1", "causal", 4)])
def test_float16_loses_at_most_twice_what_plain_float16_loses(variant: str, kind: str, r: int) -> None:
    # Triton's interpreter cannot multiply bfloat16, which is tested on a GPU
    assert_equal_to_the_formulas(inputs(variant, kind, n=70, m=140, groups=2 // min(r, 2), r=r, dtype=torch.float16))


@needs_triton
def test_large_scores_do_not_overflow() -> None:
    given = inputs("v2", "left", n=20, m=40, groups=2, h_kv=2)
    with torch.no_grad():
        given.query.mul_(1000)
    differences = errors(kernel_outputs(given), true_outputs(given, torch.float64))
    assert exceeding(differences, dict.fromkeys(NAMES, 1e-3)) == {}


@needs_triton
@pytest.mark.parametrize("name", NAMES[1:])
def test_input_that_alone_needs_a_gradient_gets_it(name: str) -> None:
    given = inputs("v2", "causal", n=20, m=20)
    leaves = [x.detach().requires_grad_(own == name) for own, x in zip(NAMES[1:], given.differentiable, strict=True)]
    output = triton_attention(*leaves, None, *given.options)
    output.sum().backward()
    (gradient,) = (leaf.grad for leaf in leaves if leaf.requires_grad)
    triton_attention(*given.differentiable, None, *given.options).sum().backward()
    assert torch.equal(gradient, given.differentiable[NAMES.index(name) - 1].grad)


@needs_triton
@pytest.mark.gpu  # the interpreter runs one program after another
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_have_equal_bits_in_every_run(variant: str) -> None:
    given = inputs(variant, "causal", n=40, m=40, groups=4, h_kv=2)
    first, second = kernel_outputs(given), kernel_outputs(given)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@needs_triton
@pytest.mark.parametrize("variant", VARIANTS)
def test_strides_change_nothing(variant: str) -> None:
    given = inputs(variant, "window", n=20, m=45, groups=2, h_kv=2)
    dense = Inputs(
        *(x.detach().contiguous().requires_grad_() for x in given.differentiable),
        given.bounds, given.map_dim, given.r, given.hull, given.visible,
    )  # fmt: skip
    assert not any(x.is_contiguous() for x in (given.query, given.key, given.value))
    first, second = kernel_outputs(given), kernel_outputs(dense)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# --- inference ------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_gradients_the_output_is_the_same_and_nothing_is_saved(variant: str) -> None:
    given = inputs(variant, "causal", n=45, m=60)
    with nan_in_new_memory(), torch.no_grad():
        output, *saved = module._forward(*given.differentiable, None, *given.options, False)
        public = triton_attention(*given.differentiable, None, *given.options)
    assert torch.equal(output, kernel_outputs(given)["output"])
    assert torch.equal(output, public)
    assert [tensor.numel() for tensor in saved] == [0, 0]


@needs_triton
@pytest.mark.parametrize(
    ("variant", "n", "kind", "splits", "r"),
    [
        ("v1", 1, "causal", 7, 1), ("v2", 5, "causal", 2, 1), ("v2", 1, "static cache", 2, 1),
        ("v1", 5, "random", 7, 1), ("v1", 5, "random", 7, 4), ("v2", 1, "causal", 2, 3),
    ],
)  # fmt: skip
def test_split_keys_give_the_same_output(
    variant: str, n: int, kind: str, splits: int, r: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(variant, kind, n=n, m=150, groups=4, h_kv=2, r=r)
    asked = []
    monkeypatch.setattr(module, "split_count", lambda *arguments: asked.append(arguments) or splits)
    with nan_in_new_memory(), torch.no_grad():
        output = triton_attention(*given.differentiable, given.bounds, *given.options)
    truth = true_outputs(given, torch.float64)["output"]
    assert [m for m, *_ in asked] == [150]
    assert (output - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize(
    ("m", "programs", "splits"),
    [(100, 8, 1), (8192, 8, 32), (8192, 32, 8), (131072, 8, 33), (131072, 1, 64), (8192, 264, 1), (8192, 1000, 1)],
)
def test_keys_are_split_until_each_processor_has_two_programs(m: int, programs: int, splits: int) -> None:
    assert split_count(m, programs, processors=132) == splits


# --- torch ----------------------------------------------------------------------------------------------------------


@needs_triton
def test_torchs_own_checks_of_the_operations_pass() -> None:
    given = inputs("v1", "window", n=3, m=20, r=2)
    query = given.query.detach().nan_to_num().requires_grad_()
    arguments = (query, *given.differentiable[1:], given.bounds, *given.options)
    for save in (False, True):
        tensors = [x.detach() if isinstance(x, torch.Tensor) and not save else x for x in arguments]
        torch.library.opcheck(module._forward, (*tensors, save))
    with torch.no_grad():
        output, outputs, lse = module._forward(*arguments, True)
        torch.library.opcheck(module._backward, (output, *arguments[:5], outputs, lse, *arguments[5:]))


@needs_triton
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_compile_without_breaks(variant: str, backend: str) -> None:
    given = inputs(variant, "left", n=20, m=30)

    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        return 2 * triton_attention(*tensors, given.bounds, *given.options)

    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    expected = with_gradients(attention(*given.differentiable), given.differentiable)
    assert exceeding(
        errors(with_gradients(compiled(*given.differentiable), given.differentiable), expected),
        dict.fromkeys(expected, 1e-6),
    ) == {}  # fmt: skip
    with torch.no_grad():
        assert torch.equal(compiled(*given.differentiable), expected["output"])


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 200])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_graph_replays_it(variant: str, n: int) -> None:
    given = inputs(variant, "static cache", n=n, m=3000, dtype=torch.bfloat16)
    arguments = (*given.differentiable, given.bounds, *given.options)
    with torch.no_grad():
        triton_attention(*arguments)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = triton_attention(*arguments)
        given.bounds[..., 1] -= 500
        given.query.mul_(0.5)
        graph.replay()
        assert torch.equal(output, triton_attention(*arguments))


def imported_as(name: str) -> ModuleType:
    """Import the module's file again under another name."""
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@needs_triton
def test_file_works_under_two_names_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs("v1", "causal", n=5, m=5)
    output = kernel_outputs(given)["output"]
    copy = imported_as("transformers_modules.some-model.triton_attention")
    assert copy._forward is not module._forward
    monkeypatch.setattr(sys.modules[__name__], "triton_attention", copy.triton_attention)
    assert torch.equal(kernel_outputs(given)["output"], output)


def test_without_triton_it_can_be_imported_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    copy = imported_as("without_triton.triton_attention")
    given = inputs("v1", "causal", n=5, m=5)
    assert not copy.HAS_TRITON
    with pytest.raises(ImportError, match="needs triton"):
        copy.triton_attention(*given.differentiable, None, *given.options)


WRONG = {
    "float64": ({"query": torch.zeros(2, 4, 5, 64).double()}, "one dtype, float16, bfloat16 or float32, got .*float64"),
    "two dtypes": ({"key": torch.zeros(2, 2, 5, 64).half()}, "of one dtype, .* got torch.float32, torch.float16"),
    "odd maps": ({"query": torch.zeros(2, 3, 5, 64)}, r"\[b, H, n, D\].*got r = 1, \(2, 3, 5, 64\)"),
    "heads without keys": (
        {"query": torch.zeros(2, 6, 5, 64)},
        r"H divisible by h_kv·\(r \+ 1\), got .*\(2, 6, 5, 64\)",
    ),
    "other groups": ({"signals_per_noise": 2}, r"got r = 2, \(2, 4, 5, 64\), \(2, 2, 5, 64\)"),
    "no signals": ({"signals_per_noise": 0}, "signals_per_noise must be at least 1, got 0"),
    "other values": ({"value": torch.zeros(2, 2, 6, 64)}, r"got .*\(2, 2, 6, 64\)"),
    "map_dim": ({"map_dim": 16}, "map_dim D or D/2, got 64 and 16"),
    "stride": ({"query": torch.zeros(2, 4, 64, 5).transpose(2, 3)}, "last dimension .* contiguous"),
    "dtype of λ": ({"differential_lambda": torch.zeros(1).half()}, "λ must be float32, .*got torch.float16"),
    "shape of λ": ({"differential_lambda": torch.zeros(2, 5, 1)}, r"\[2, 5, 2, 1\], got torch.float32, \[2, 5, 1\]"),
    "fewer keys": ({"query": torch.zeros(2, 4, 6, 64)}, "a key for each of the 6 queries, got 5 keys"),
    "dtype of bounds": ({"bounds": torch.zeros(2, 1, 5, 2).long()}, "Bounds must be int32, .*got torch.int64"),
    "shape of bounds": ({"bounds": torch.zeros(2, 5, 2).int()}, r"\[2, 1, 5, 2\], got torch.int32, \[2, 5, 2\]"),
    "scaling": ({"scaling": 0.0}, "must be positive, got 0.0"),
}


@needs_triton
@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_wrong_inputs_are_refused(wrong: dict[str, object], message: str) -> None:
    right = {
        "query": torch.zeros(2, 4, 5, 64),
        "key": torch.zeros(2, 2, 5, 64),
        "value": torch.zeros(2, 2, 5, 64),
        "differential_lambda": torch.zeros(1),
        "bounds": None,
        "map_dim": 32,
        "scaling": 1.0,
        "signals_per_noise": 1,
    }
    with pytest.raises(ValueError, match=message):
        triton_attention(**right | wrong)


# --- on a GPU: half precision, real sizes ---------------------------------------------------------------------------


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("variant", VARIANTS)
def test_longer_texts_equal_the_formulas(variant: str, width: int, dtype: torch.dtype) -> None:
    for kind, (groups, r) in product(KINDS, ((2, 1), (6, 1), (2, 2), (4, 3), (2, 4))):
        given = inputs(variant, kind, n=333, m=701, width=width, groups=groups, h_kv=2, r=r, dtype=dtype)
        assert_equal_to_the_formulas(given)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_decoding_from_long_caches_equals_the_formulas(variant: str, width: int, dtype: torch.dtype) -> None:
    for kind, (groups, r), n in product(
        ("causal", "left", "static cache"), ((2, 1), (14, 1), (2, 3), (2, 4)), (1, 3, 16)
    ):
        given = inputs(variant, kind, n=n, m=5000, width=width, groups=groups, h_kv=2, r=r, dtype=dtype)
        with nan_in_new_memory():
            output = triton_attention(*given.differentiable, given.bounds, *given.options)
        with torch.enable_grad():
            truth, plain = (true_outputs(given, each)["output"].double() for each in (torch.float64, dtype))
        assert (output - truth).abs().max() <= 2 * (plain - truth).abs().max(), (kind, groups, r, n)
