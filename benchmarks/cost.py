# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of attention, by how it is computed.

The unit is n²d multiply-adds, those of the product of [n, d] and [d, n]; for one query, n·d. The numbers are for two
heads of width d of the Transformer and what a differential model has instead: one head of V1, whose two maps of width d
share values of width 2d, or two heads of V2, each with two maps and values of width d (1.25 maps per head where four
signal heads share a noise head).
"""

FLOPS = {
    "transformer": (2, 2, 2, 2),
    "v1 padded call": (4, 4, 4, 4),
    "v1 fused": (2, 4, 2, 2),
    "v1 blocked": (2, 2, 2, 2),
    "v2 one call": (4, 4, 4, 4),
    "v2 fused": (4, 4, 2, 2),
    "v2 blocked": (4, 2, 2, 2),
    "v2-4to1 one call": (2.5, 2.5, 2.5, 2.5),
    "v2-4to1 fused": (2.5, 2.5, 2, 2),
    "v2-4to1 blocked": (2.5, 2, 2, 2),
}
"""Variant and method -> units of QKᵀ, and of one product of maps and V in the forward, in the backward and for a query.

One (padded) call of `sdpa` multiplies each map by V; V1 pads its two queries to the width of the joined keys. A fused
kernel computes each map at its own width and multiplies each by the same tile of V; its backward computes dP = dO·Vᵀ
and dV = (P1 - λP2)ᵀ·dO once per signal map. A blocked method has whole rows of the maps and subtracts them before it
multiplies by V.
"""


def units(method: str, step: str) -> float:
    """Return the units of a step: "prefill" (forward), "train" (forward and backward) or "decode" (one query).

    The backward recomputes QKᵀ and computes dQ and dK; dP and dV.
    """
    scores, values, values_backward, values_of_one_query = FLOPS[method]
    if step == "decode":
        return scores + values_of_one_query
    return scores + values + (3 * scores + 2 * values_backward if step == "train" else 0)


def floors(step: str) -> dict[str, float]:
    """Return each method's units as a multiple of the Transformer's."""
    return {method: units(method, step) / units("transformer", step) for method in FLOPS if method != "transformer"}
