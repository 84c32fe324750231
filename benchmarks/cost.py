# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""What attention costs by arithmetic, whatever computes it.

The unit is n²d multiplications with additions: what a product of [n, d] and [d, n] takes; for one query, n·d. Numbers
are for two heads of width d of the Transformer, and for what a differential model has in their place: one head of V1,
whose two maps of width d share values of width 2d, or two heads of V2, each with two maps and values of width d (where
four share their second map, with 1.25).
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
"""Variant and way of computing it -> units of QKᵀ, and of one product of maps and V: forward, backward, for one query.

A call (`sdpa`) multiplies each map with V, and V1's two queries are padded to the width of the joined keys. A fused
kernel multiplies all maps of their own width with one tile of V; its backward needs dP = dO·Vᵀ and
dV = (P1 - λP2)ᵀ·dO only once for each signal map. Blocked: maps are there as a whole, in memory or since there is one
query, and subtracted before V.
"""


def units(way: str, step: str) -> float:
    """Units of a step: "prefill" (a forward), "train" (forward and backward) or "decode" (a forward of one query).

    A backward computes QKᵀ again, dQ and dK; dP and dV.
    """
    scores, values, values_backward, values_of_one = FLOPS[way]
    if step == "decode":
        return scores + values_of_one
    return scores + values + (3 * scores + 2 * values_backward if step == "train" else 0)


def floors(step: str) -> dict[str, float]:
    """Each way's units in those of the Transformer."""
    return {way: units(way, step) / units("transformer", step) for way in FLOPS if way != "transformer"}
