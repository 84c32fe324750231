"""`cost` equals the operations that torch counts in the plain formulas of attention."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost import FLOPS, units


N, D = 32, 8
SHAPES = {  # maps, width of queries and keys, number and width of values, whether maps are subtracted before values;
    # for two heads of the Transformer, or for four if four share a noise map
    "transformer": (2, D, 2, D, False),
    "v1 padded call": (2, 2 * D, 2, 2 * D, False),
    "v1 fused": (2, D, 2, 2 * D, False),
    "v1 blocked": (2, D, 1, 2 * D, True),
    "v2 one call": (4, D, 4, D, False),
    "v2 fused": (4, D, 4, D, False),
    "v2 blocked": (4, D, 2, D, True),
    "v2-4to1 one call": (5, D, 5, D, False),
    "v2-4to1 fused": (5, D, 5, D, False),
    "v2-4to1 blocked": (5, D, 4, D, True),
}


def softmax_maps(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query @ key.transpose(-1, -2)).softmax(-1)


def counted(compute: Callable[[], object], queries: int) -> float:
    """Count multiply-adds, in units of n·m·d."""
    with FlopCounterMode(display=False) as counter:
        compute()
    return counter.get_total_flops() / (2 * queries * N * D)


def plain(way: str, queries: int = N) -> tuple[float, float]:
    """Return the costs of a forward and of a backward that computes the maps again instead of storing them."""
    maps, width, values, value_width, subtracts = SHAPES[way]
    query = torch.randn(maps, queries, width, requires_grad=True)
    key = torch.randn(maps, N, width, requires_grad=True)
    value = torch.randn(values, N, value_width, requires_grad=True)
    outputs = []

    def forward() -> None:
        weights = checkpoint(softmax_maps, query, key, use_reentrant=False)
        if subtracts:
            weights = weights[:values] - 0.5 * weights[values:]
        outputs.append(weights @ value)

    return counted(forward, queries), counted(lambda: outputs[0].sum().backward(), queries)


@pytest.mark.parametrize("way", FLOPS)
def test_units_are_what_torch_counts(way: str) -> None:
    blocked = way.replace("fused", "blocked")  # fused kernels multiply as blocked ones in a backward, and for one query
    forward, backward = plain(way)[0], plain(blocked)[1]
    pairs = 2 if "4to1" in way else 1
    assert pairs * units(way, "prefill") == forward
    assert pairs * units(way, "train") == forward + backward
    assert pairs * units(way, "decode") == plain(blocked, queries=1)[0]
