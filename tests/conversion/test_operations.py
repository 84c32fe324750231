"""Every operation, compared with loops over heads that index every row or column."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from diffllama import DiffLlamaConfig
from diffllama.conversion import operations
from support.tiny_models import tiny_config


HIDDEN = 5
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Sizes(NamedTuple):
    """Numbers of signal heads and key/value heads, d = D/2, and number of signals in a group."""

    h: int
    h_kv: int
    d: int
    r: int = 1

    def config(self, variant: str, **fields: float) -> DiffLlamaConfig:
        """Return our configuration with these sizes."""
        noise = self.h // self.r
        heads = {"num_attention_heads": self.h + noise, "num_noise_heads": noise, "num_key_value_heads": self.h_kv}
        return tiny_config(variant, **heads, head_dim=2 * self.d, **fields)


SIZES = [Sizes(1, 1, 2), Sizes(3, 3, 4), Sizes(4, 2, 2), Sizes(6, 2, 6), Sizes(6, 1, 2), Sizes(12, 3, 4)]
GROUPS = [*SIZES, Sizes(3, 1, 2, 3), Sizes(6, 2, 4, 3), Sizes(8, 2, 2, 2)]


def numbered(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a tensor whose entries all differ (in float64)."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


def apply(
    operation: Callable[..., torch.Tensor], config: DiffLlamaConfig, tensor: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """Apply an operation. Checks that it keeps dtypes, changes no input, and has the planned shape."""
    before = tensor.clone()
    result = operation(tensor, config, *others)
    planned = operation(tensor.to("meta"), config, *(other.to("meta") for other in others))
    assert (planned.shape, planned.dtype, planned.is_meta) == (result.shape, tensor.dtype, True)
    assert result.dtype == tensor.dtype
    assert torch.equal(tensor, before)
    return result


# The operation's number of source rows, and the source row of each result row, for a layout


def vectors(order: list[int], width: int) -> list[int]:
    """Return the rows of whole vectors."""
    return [vector * width + row for vector in order for row in range(width)]


def fused(s: Sizes) -> int:
    return (s.h + 2 * s.h_kv) * 2 * s.d


def fused_rows(s: Sizes, first: int, count: int) -> list[int]:
    """Return the rows of `heads` heads from `first` on, in fused queries, keys and values."""
    return [first * 2 * s.d + row for row in range(count * 2 * s.d)]


def paired_heads(s: Sizes) -> list[tuple[int, int]]:
    """Source: 2h query heads, of which `group` neighbours read one of 2·h_kv keys. For each head of ours, the source's
    in its place that read keys 2j and 2j + 1, those of the key/value head j that it reads."""
    group, pairs = s.h // s.h_kv, []
    for i in range(s.h):
        j = i // group
        first, second = ([q for q in range(2 * s.h) if q // group == key][i % group] for key in (2 * j, 2 * j + 1))
        pairs.append((first, second))
    return pairs


def neighbours(n: int, width: int) -> list[int]:
    order = []
    for i in range(n // 2):
        order += [i, i + n // 2]
    return vectors(order, width)


def halves(n: int, width: int) -> list[int]:
    return vectors([*range(0, n, 2), *range(1, n, 2)], width)


def half_rotated(n: int, width: int) -> list[int]:
    """Return rows in half-rotation order: row i < w/2 is row 2i of the pairs, row i + w/2 is row 2i + 1."""
    rows = []
    for vector in range(n):
        for i in range(width):
            rows.append(vector * width + (2 * i if i < width // 2 else 2 * (i - width // 2) + 1))
    return rows


def interleaved(n: int, width: int) -> list[int]:
    rows = []
    for vector in range(n):
        for i in range(width // 2):
            rows += [vector * width + i, vector * width + i + width // 2]
    return rows


def repeated_keys(s: Sizes) -> list[int]:
    r = s.h // s.h_kv
    return vectors([key for i in range(s.h) for key in (2 * i // r, (2 * i + 1) // r)], s.d)


def repeated_values(s: Sizes) -> list[int]:
    return vectors([i // (s.h // s.h_kv) for i in range(s.h)], 2 * s.d)


class Reordering(NamedTuple):
    """An operation that moves rows: the number of source rows, and the source row of each result row."""

    operation: Callable[[torch.Tensor, DiffLlamaConfig], torch.Tensor]
    variants: tuple[str, ...]
    rows: Callable[[Sizes], int]
    order: Callable[[Sizes], list[int]]


BOTH = ("v1", "v2")
REORDERINGS = {
    "query_rows": Reordering(operations.query_rows, BOTH, fused, lambda s: fused_rows(s, 0, s.h)),
    "key_rows": Reordering(operations.key_rows, BOTH, fused, lambda s: fused_rows(s, s.h, s.h_kv)),
    "value_rows": Reordering(operations.value_rows, BOTH, fused, lambda s: fused_rows(s, s.h + s.h_kv, s.h_kv)),
    "first_half": Reordering(operations.first_half, BOTH, lambda s: 2 * s.d, lambda s: list(range(s.d))),
    "second_half": Reordering(operations.second_half, BOTH, lambda s: 2 * s.d, lambda s: list(range(s.d, 2 * s.d))),
    "flip": Reordering(operations.flip, BOTH, lambda s: 3, lambda s: [2, 1, 0]),
    "repeat_keys": Reordering(operations.repeat_keys, ("v1",), lambda s: 2 * s.h_kv * s.d, repeated_keys),
    "repeat_values": Reordering(operations.repeat_values, ("v1",), lambda s: s.h_kv * 2 * s.d, repeated_values),
} | {
    f"{operation.__name__} of {heads}": Reordering(
        operation,
        (variant,),
        lambda s, count=count, width=width: count(s) * width(s),
        lambda s, order=order, count=count, width=width: order(count(s), width(s)),
    )
    for operation, variant, order, width in (
        (operations.neighbours_from_halves, "v1", neighbours, lambda s: s.d),
        (operations.halves_from_neighbours, "v1", halves, lambda s: s.d),
        (operations.half_from_interleaved, "v1", half_rotated, lambda s: s.d),
        (operations.interleaved_from_half, "v1", interleaved, lambda s: s.d),
        (operations.half_from_interleaved, "v2", half_rotated, lambda s: 2 * s.d),
        (operations.interleaved_from_half, "v2", interleaved, lambda s: 2 * s.d),
    )
    for heads, count in ((f"queries in {variant}", lambda s: 2 * s.h), (f"keys in {variant}", lambda s: 2 * s.h_kv))
}
each_reordering = pytest.mark.parametrize(
    ("variant", "case"),
    [
        pytest.param(variant, case, id=name if case.variants != BOTH else f"{name}-{variant}")
        for name, case in REORDERINGS.items()
        for variant in case.variants
    ],
)
each_size = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))


@each_size
@each_reordering
def test_rows_of_weights_and_biases_go_where_they_belong(variant: str, case: Reordering, sizes: Sizes) -> None:
    config, order = sizes.config(variant), case.order(sizes)
    for shape in ((case.rows(sizes), HIDDEN), (case.rows(sizes),)):
        tensor = numbered(*shape)
        expected = torch.stack([tensor[row] for row in order])
        assert torch.equal(apply(case.operation, config, tensor), expected)


@pytest.mark.parametrize("sizes", GROUPS, ids=lambda sizes: "-".join(map(str, sizes)))
def test_columns_of_the_output_projection_go_where_the_paired_heads_are(sizes: Sizes) -> None:
    tensor = numbered(HIDDEN, 2 * sizes.h * sizes.d)
    order = vectors([head for pair in paired_heads(sizes) for head in pair], sizes.d)
    expected = torch.stack([tensor[:, column] for column in order], dim=1)
    assert torch.equal(apply(operations.pair_head_columns, sizes.config("v1"), tensor), expected)


# Values


@pytest.mark.parametrize("variant", BOTH)
@pytest.mark.parametrize("sizes", GROUPS, ids=lambda sizes: "-".join(map(str, sizes)))
def test_noise_behind_each_group_is_the_mean_of_heads(sizes: Sizes, variant: str) -> None:
    """In V2 these are the group's signals, in V1 the heads that are paired with them."""
    operation, width = operations.append_noise_queries, 2 * sizes.d
    signals = noises = list(range(sizes.h))
    if variant == "v1":
        operation, width = operations.pair_query_heads, sizes.d
        signals, noises = ([pair[part] for pair in paired_heads(sizes)] for part in (0, 1))
    heads = sizes.h if variant == "v2" else 2 * sizes.h
    for shape in ((heads * width, HIDDEN), (heads * width,)):
        tensor = numbered(*shape).square()
        source, expected = tensor.unflatten(0, (heads, width)), []
        for first in range(0, sizes.h, sizes.r):
            group = range(first, first + sizes.r)
            expected += [source[signals[i]] for i in group] + [sum(source[noises[i]] for i in group) / sizes.r]
        result = apply(operation, sizes.config(variant), tensor).unflatten(0, (-1, width))
        torch.testing.assert_close(result, torch.stack(expected), rtol=1e-15, atol=0)


@pytest.mark.parametrize("sizes", GROUPS, ids=lambda sizes: "-".join(map(str, sizes)))
def test_group_mean_makes_up_for_half_of_a_noise_that_is_the_mean(sizes: Sizes) -> None:
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(HIDDEN, sizes.h * 2 * sizes.d, dtype=torch.float64, generator=generator)
    heads = torch.randn(3, sizes.h // sizes.r, sizes.r, 2 * sizes.d, dtype=torch.float64, generator=generator)
    differences = heads - heads.mean(2, keepdim=True) / 2
    result = differences.flatten(1) @ apply(operations.add_group_mean, sizes.config("v2"), projection).T
    torch.testing.assert_close(result, heads.flatten(1) @ projection.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_and_double_of_a_group_of_one_are_exact(dtype: torch.dtype) -> None:
    config = Sizes(4, 2, 2).config("v2")
    queries = torch.randn(16, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    copies = apply(operations.append_noise_queries, config, queries).unflatten(0, (4, 2, 4))
    assert torch.equal(copies, queries.unflatten(0, (4, 1, 4)).expand(4, 2, 4, 500))
    assert torch.equal(apply(operations.add_group_mean, config, queries.T).double(), 2 * queries.T.double())


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute RMSNorm over the last dimension, without a weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-8, 2.5e-5])
@pytest.mark.parametrize("size", [1.0, 1e-3])  # ε is small compared with the mean of squares, or not
def test_scaled_values_have_the_same_norm_with_the_other_epsilon(size: float, eps: float) -> None:
    values = size * torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    config = tiny_config(rms_norm_eps=eps, head_norm_eps=1e-4)
    theirs = rms_norm(apply(operations.scale_to_their_epsilon, config, values), eps)
    torch.testing.assert_close(theirs, rms_norm(values, 1e-4), rtol=1e-14, atol=0)  # few roundings of 2⁻⁵³
    if size < 1:  # a wrong scale would be noticed
        assert not torch.allclose(rms_norm(values, eps), rms_norm(values, 1e-4), rtol=1e-2)


@each_size
def test_folded_head_norm_is_the_norms_weight_and_then_the_projection(sizes: Sizes) -> None:
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(HIDDEN, sizes.h * 2 * sizes.d, dtype=torch.float64, generator=generator)
    weight = torch.randn(2 * sizes.d, dtype=torch.float64, generator=generator)
    heads = torch.randn(3, sizes.h, 2 * sizes.d, dtype=torch.float64, generator=generator)
    expected = (heads * weight).flatten(1) @ projection.T
    folded = apply(operations.fold_head_norm, sizes.config("v1"), projection, weight)
    apply(operations.fold_head_norm, sizes.config("v1"), projection.bfloat16(), weight.float())
    # sums of at most 96 terms of order one, in float64
    torch.testing.assert_close(heads.flatten(1) @ folded.T, expected, rtol=0, atol=1e-12)


def test_no_operation_is_left_out() -> None:
    public = {
        name
        for name, value in vars(operations).items()
        if callable(value) and value.__module__ == operations.__name__ and not name.startswith("_")
    }
    tested = {case.operation.__name__ for case in REORDERINGS.values()} | {"pair_query_heads", "pair_head_columns"}
    tested |= {"append_noise_queries", "add_group_mean", "fold_head_norm", "scale_to_their_epsilon"}
    assert public == tested | {"sizes"}
