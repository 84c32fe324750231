"""Every operation, against the index of every row or column written out in loops over heads."""

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
    """Heads, key/value heads, and d = D/2."""

    h: int
    h_kv: int
    d: int

    def config(self, variant: str, **fields: float) -> DiffLlamaConfig:
        """Our configuration with these sizes."""
        return tiny_config(
            variant, num_attention_heads=2 * self.h, num_key_value_heads=self.h_kv, head_dim=2 * self.d, **fields
        )


SIZES = [Sizes(1, 1, 2), Sizes(3, 3, 4), Sizes(4, 2, 2), Sizes(6, 2, 6), Sizes(6, 1, 2), Sizes(12, 3, 4)]


def numbered(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A tensor whose entries all differ (in float64)."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


def apply(
    operation: Callable[..., torch.Tensor], config: DiffLlamaConfig, tensor: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """What an operation makes. It keeps dtypes, changes no tensor of the source, and its shape can be planned."""
    before = tensor.clone()
    result = operation(tensor, config, *others)
    planned = operation(tensor.to("meta"), config, *(other.to("meta") for other in others))
    assert (planned.shape, planned.dtype, planned.is_meta) == (result.shape, tensor.dtype, True)
    assert result.dtype == tensor.dtype
    assert torch.equal(tensor, before)
    return result


# For a layout: the operation's number of rows, and for each row of the result, the row of the source


def vectors(order: list[int], width: int) -> list[int]:
    """The rows of whole vectors."""
    return [vector * width + row for vector in order for row in range(width)]


def duplicated(s: Sizes) -> list[int]:
    return vectors([i for i in range(s.h) for _copy in range(2)], 2 * s.d)


def fused(s: Sizes) -> int:
    return (s.h + 2 * s.h_kv) * 2 * s.d


def fused_rows(s: Sizes, first: int, count: int) -> list[int]:
    """The rows of so many heads, from one on, of queries, keys and values one below the other."""
    return [first * 2 * s.d + row for row in range(count * 2 * s.d)]


def paired_queries(s: Sizes) -> list[int]:
    """Source: 2h query heads, of which `group` neighbours read one of 2·h_kv keys. Head i's maps read keys 2j, 2j + 1
    of the key/value head j that it reads."""
    group, order = s.h // s.h_kv, []
    for i in range(s.h):
        j = i // group
        for key in (2 * j, 2 * j + 1):
            order.append([q for q in range(2 * s.h) if q // group == key][i % group])
    return vectors(order, s.d)


def neighbours(n: int, width: int) -> list[int]:
    order = []
    for i in range(n // 2):
        order += [i, i + n // 2]
    return vectors(order, width)


def halves(n: int, width: int) -> list[int]:
    return vectors([*range(0, n, 2), *range(1, n, 2)], width)


def half_rotated(n: int, width: int) -> list[int]:
    """Row i < w/2 is row 2i of the pairs, row i + w/2 is row 2i + 1."""
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
    """An operation that moves rows: how many the source has, and which one each row of the result is."""

    operation: Callable[[torch.Tensor, DiffLlamaConfig], torch.Tensor]
    variants: tuple[str, ...]
    rows: Callable[[Sizes], int]
    order: Callable[[Sizes], list[int]]


BOTH = ("v1", "v2")
REORDERINGS = {
    "duplicate_heads": Reordering(operations.duplicate_heads, ("v2",), lambda s: s.h * 2 * s.d, duplicated),
    "query_rows": Reordering(operations.query_rows, BOTH, fused, lambda s: fused_rows(s, 0, s.h)),
    "key_rows": Reordering(operations.key_rows, BOTH, fused, lambda s: fused_rows(s, s.h, s.h_kv)),
    "value_rows": Reordering(operations.value_rows, BOTH, fused, lambda s: fused_rows(s, s.h + s.h_kv, s.h_kv)),
    "first_half": Reordering(operations.first_half, BOTH, lambda s: 2 * s.d, lambda s: list(range(s.d))),
    "second_half": Reordering(operations.second_half, BOTH, lambda s: 2 * s.d, lambda s: list(range(s.d, 2 * s.d))),
    "pair_query_heads": Reordering(operations.pair_query_heads, ("v1",), lambda s: 2 * s.h * s.d, paired_queries),
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


@each_size
def test_columns_of_the_output_projection_go_where_the_paired_heads_are(sizes: Sizes) -> None:
    tensor = numbered(HIDDEN, 2 * sizes.h * sizes.d)
    expected = torch.stack([tensor[:, column] for column in paired_queries(sizes)], dim=1)
    assert torch.equal(apply(operations.pair_head_columns, sizes.config("v1"), tensor), expected)


# Values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_doubling_is_exact(dtype: torch.dtype) -> None:
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(apply(operations.double, tiny_config("v2"), tensor).double(), 2 * tensor.double())


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, without a weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-8, 2.5e-5])
@pytest.mark.parametrize("size", [1.0, 1e-3])  # ε is small beside the mean of squares, or not
def test_scaled_values_have_the_same_norm_with_the_other_epsilon(size: float, eps: float) -> None:
    values = size * torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    config = tiny_config(rms_norm_eps=eps)
    ours = rms_norm(apply(operations.scale_to_our_epsilon, config, values), 1e-5)
    torch.testing.assert_close(ours, rms_norm(values, eps), rtol=1e-14, atol=0)  # few roundings of 2⁻⁵³
    theirs = rms_norm(apply(operations.scale_to_their_epsilon, config, values), eps)
    torch.testing.assert_close(theirs, rms_norm(values, 1e-5), rtol=1e-14, atol=0)
    again = operations.scale_to_their_epsilon(operations.scale_to_our_epsilon(values, config), config)
    torch.testing.assert_close(again, values, rtol=1e-15, atol=0)
    if size < 1:  # the test could tell a wrong scale
        assert not torch.allclose(rms_norm(values, eps), rms_norm(values, 1e-5), rtol=1e-2)


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
    tested = {case.operation.__name__ for case in REORDERINGS.values()} | {"pair_head_columns", "fold_head_norm"}
    assert public == tested | {"double", "scale_to_our_epsilon", "scale_to_their_epsilon", "sizes"}
