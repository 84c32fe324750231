# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Fused kernels for differential attention, in Triton: (softmax(Q1 K1ᵀ) - λ softmax(Q2 K2ᵀ)) V without the maps.

All maps of a group, r signals and the noise that they subtract, are computed against one tile of values, which is read
once, with an online softmax for each. In units of n²d multiplications and additions (d = D/2; arXiv 2410.05258, section
2.1), V1's forward at r = 1 takes 6: QKᵀ 2, PV 4. Its backward takes 10 if each product is computed once: QKᵀ 2, and 2
each for dP = dO Vᵀ, which both maps share, for dV = (P1 - λP2)ᵀ dO, for dQ and for dK. Two kernels without atomics, one
for dQ and one for dK and dV, recompute QKᵀ and dP and take 14; they give equal bits in every run. Any r takes 3(r + 1)
forward, 6r + 2 for dK and dV, and 4(r + 1) for dQ (6 at r = 1, where the maps share dP). Tiles of the forward and of dQ
have room for the next power of two of signals: r = 3 pays for 4.

With δ = Σ dO∘O over a row, for each signal: dS = P∘(dP - δ), and δ_noise = Σ dO∘O_noise: dλ = -δ_noise,
dS_noise = -Σ λ P_noise∘(dP - δ_noise) over the group's signals. So a backward needs from its forward the maps' outputs
and the logarithms of their softmaxes' sums.

Letters in shapes: b batch, n tokens with a query, m keys, s signal heads, H queries of signals and noise, h_kv
key/value heads, D width of values. A program works on rows of one key/value head: a row is a token's queries in one of
the groups that share keys and values. Rows are counted token by token, so that a program reads keys once for all these
groups, and a step of decoding fills one tile.
"""

import re
from typing import Any

import torch


try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # a machine without a GPU
    HAS_TRITON = False


DTYPES = (torch.float16, torch.bfloat16, torch.float32)

LOG2_E = 1.4426950408889634
"""Kernels compute exp(x) as 2^(x·log2(e)), which is one instruction."""

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options: x·y + z is one instruction. Set because Triton's default will change."""

DECODING_TOKENS = 16
"""Maximum number of query tokens for which several programs share the keys of a row, if processors would be idle."""

_NAMESPACE = re.sub(r"\W", "_", __name__)  # the file may be imported by the package and from a repository


if HAS_TRITON:

    @triton.jit
    def load_tile(pointer, offsets, kept, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """Load rows of WIDTH numbers at `offsets`; 0 in rows that are not `kept` (None: all are) and up to BLOCK."""
        columns = tl.arange(0, BLOCK)[None, :]
        inside = columns < WIDTH
        if kept is not None:
            inside = inside & kept[:, None]
        return tl.load(pointer + offsets[:, None] + columns, mask=inside, other=0.0)

    @triton.jit
    def store_tile(pointer, offsets, kept, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """Store a tile where `load_tile` loads it."""
        columns = tl.arange(0, BLOCK)[None, :]
        tl.store(pointer + offsets[:, None] + columns, tile, mask=kept[:, None] & (columns < WIDTH))

    @triton.jit
    def query_rows(first, n, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, MAPS: tl.constexpr, BLOCK_R: tl.constexpr):
        """Return the indices of BLOCK_M rows with the first MAPS maps of each, side by side, padded to BLOCK_R maps.

        They are: which rows exist, their tokens, groups and maps, and their groups' index in tensors [b, n, groups].
        Rows and maps that do not exist repeat the last one.
        """
        maps = tl.arange(0, BLOCK_M * BLOCK_R)
        rows = first + maps // BLOCK_R
        maps = maps % BLOCK_R
        kept = (rows < n * GROUPS) & (maps < MAPS)
        rows = tl.minimum(rows, n * GROUPS - 1)
        tokens = rows // GROUPS
        groups = (tl.program_id(1) * GROUPS + rows % GROUPS).to(tl.int64)
        index = (tl.program_id(2).to(tl.int64) * n + tokens) * (tl.num_programs(1) * GROUPS) + groups
        return kept, tokens, groups, tl.minimum(maps, MAPS - 1), index

    @triton.jit
    def seen_keys(p_bounds, tokens, n, m):
        """Return the half-open intervals of keys that tokens see."""
        if p_bounds is None:
            start, end = tokens * 0, tokens + (m - n + 1)
        else:
            p_bounds += (tl.program_id(2).to(tl.int64) * n + tokens) * 2
            start, end = tl.maximum(tl.load(p_bounds), 0), tl.minimum(tl.load(p_bounds + 1), m)
        return start, end

    @triton.jit
    def key_range(start, end, m, split, splits, BLOCK_N: tl.constexpr):
        """Return the interval [first, last) of keys that any row sees, or this split's part of it.

        Also returns [all_first, all_last), whole blocks counted from `first`, whose keys all rows see.
        """
        first = tl.min(tl.where(start < end, start, m))
        last = tl.maximum(tl.max(tl.where(start < end, end, 0)), first)
        length = tl.cdiv(tl.cdiv(last - first, splits), BLOCK_N) * BLOCK_N
        first = tl.minimum(first + split * length, last)
        last = tl.minimum(first + length, last)
        all_first = tl.minimum(first + tl.cdiv(tl.maximum(tl.max(start) - first, 0), BLOCK_N) * BLOCK_N, last)
        all_last = all_first + tl.maximum(tl.minimum(tl.min(end), last) - all_first, 0) // BLOCK_N * BLOCK_N
        return first, all_first, all_last, last

    @triton.jit
    def attend(b_query, b_key, b_value, visible, b_max, b_sum, b_output, scale):
        """Add a tile of keys and values to the online softmax of one map. `visible` is None where all keys are."""
        b_scores = tl.dot(b_query, tl.trans(b_key), input_precision="ieee")
        if visible is not None:
            b_scores = tl.where(visible, b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, 1))
        b_shift = b_new_max * scale
        if visible is not None:
            b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_shift)  # no key seen yet
        b_weights = tl.exp2(b_scores * scale - b_shift[:, None])
        b_decay = tl.exp2(b_max * scale - b_shift)
        b_sum = b_sum * b_decay + tl.sum(b_weights, 1)
        b_output = tl.dot(b_weights.to(b_value.dtype), b_value, b_output * b_decay[:, None], input_precision="ieee")
        return b_new_max, b_sum, b_output

    @triton.jit
    def normalized(b_max, b_sum, b_output, scale):
        """Return a map's output, and the logarithm of its sum to base 2; 0 and -∞ for rows that saw no key."""
        b_sum = tl.where(b_sum > 0, b_sum, 1.0)
        return b_output / b_sum[:, None], b_max * scale + tl.log2(b_sum)

    @triton.jit(do_not_specialize=["n", "m", "splits"])
    def forward_kernel(
        p_query, p_key, p_value, p_lambda, p_bounds, p_output, p_outputs, p_lse,
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
        stride_lambda, n, m, splits, scale,
        D: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, SIGNALS: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """Compute rows of one key/value head with their keys, or with one of `splits` parts of these.

        Stores the combined output [b, n, s, D], the maps' outputs [splits, b, n, H, D] and the logarithms of their
        softmaxes' sums [splits, b, n, H], each if its pointer is given.
        """
        batch, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
        split = tl.program_id(0) % splits
        block = (tl.num_programs(0) - 1 - tl.program_id(0)) // splits  # the longest causal rows first
        kept1, tokens1, groups1, signals, index1 = query_rows(block * BLOCK_M, n, GROUPS, BLOCK_M, SIGNALS, BLOCK_R)
        kept2, tokens2, groups2, _, index2 = query_rows(block * BLOCK_M, n, GROUPS, BLOCK_M, 1, 1)
        start1, end1 = seen_keys(p_bounds, tokens1, n, m)
        start2, end2 = seen_keys(p_bounds, tokens2, n, m)
        first, all_first, all_last, last = key_range(start2, end2, m, split, splits, BLOCK_N)

        p_query += batch * stride_qb
        p_key += batch * stride_kb + kv_head * stride_kh
        p_value += batch * stride_vb + kv_head * stride_vh
        queries1 = tokens1.to(tl.int64) * stride_qn + (groups1 * (SIGNALS + 1) + signals) * stride_qh
        queries2 = tokens2.to(tl.int64) * stride_qn + (groups2 * (SIGNALS + 1) + SIGNALS) * stride_qh
        b_query1 = load_tile(p_query, queries1, kept1, W, BLOCK_W)
        b_query2 = load_tile(p_query + (D - W), queries2, kept2, W, BLOCK_W)
        b_max1 = tl.full([BLOCK_M * BLOCK_R], float("-inf"), tl.float32)
        b_max2 = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum1 = tl.zeros([BLOCK_M * BLOCK_R], tl.float32)
        b_sum2 = tl.zeros([BLOCK_M], tl.float32)
        b_output1 = tl.zeros([BLOCK_M * BLOCK_R, BLOCK_D], tl.float32)
        b_output2 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        FIRST_PART: tl.constexpr = 1 if p_bounds is None else 0
        for part in tl.static_range(FIRST_PART, 3):
            if part == 0:
                part_first, part_last = first, all_first
            elif part == 1:
                part_first, part_last = all_first, all_last
            else:
                part_first, part_last = all_last, last
            for key in range(part_first, part_last, BLOCK_N):
                columns = tl.arange(0, BLOCK_N)
                if part == 1:
                    inside, seen1, seen2 = None, None, None
                else:
                    inside = key + columns < last  # memory beyond it may contain anything
                    seen1 = (key + columns >= start1[:, None]) & (key + columns < end1[:, None])
                    seen2 = (key + columns >= start2[:, None]) & (key + columns < end2[:, None])
                p_key_tile = p_key + tl.cast(key, tl.int64) * stride_kn
                p_value_tile = p_value + tl.cast(key, tl.int64) * stride_vn
                b_key1 = load_tile(p_key_tile, columns * stride_kn, inside, W, BLOCK_W)
                b_key2 = b_key1 if W == D else load_tile(p_key_tile + W, columns * stride_kn, inside, W, BLOCK_W)
                b_value = load_tile(p_value_tile, columns * stride_vn, inside, D, BLOCK_D)
                b_max1, b_sum1, b_output1 = attend(b_query1, b_key1, b_value, seen1, b_max1, b_sum1, b_output1, scale)
                b_max2, b_sum2, b_output2 = attend(b_query2, b_key2, b_value, seen2, b_max2, b_sum2, b_output2, scale)

        b_output1, b_lse1 = normalized(b_max1, b_sum1, b_output1, scale)
        b_output2, b_lse2 = normalized(b_max2, b_sum2, b_output2, scale)
        if p_outputs is not None:
            count = tl.num_programs(2).to(tl.int64) * n * tl.num_programs(1) * GROUPS
            maps1 = (split * count + index1) * (SIGNALS + 1) + signals
            maps2 = (split * count + index2) * (SIGNALS + 1) + SIGNALS
            store_tile(p_outputs, maps1 * D, kept1, b_output1, D, BLOCK_D)
            store_tile(p_outputs, maps2 * D, kept2, b_output2, D, BLOCK_D)
            tl.store(p_lse + maps1, b_lse1, mask=kept1)
            tl.store(p_lse + maps2, b_lse2, mask=kept2)
        if p_output is not None:
            index1 = index1 * SIGNALS + signals
            b_lambda = tl.load(p_lambda + index1 * stride_lambda)
            if BLOCK_R > 1:  # puts the noise's output beside each signal's
                b_output2 = tl.broadcast_to(b_output2[:, None, :], [BLOCK_M, BLOCK_R, BLOCK_D])
                b_output2 = tl.reshape(b_output2, [BLOCK_M * BLOCK_R, BLOCK_D])
            store_tile(p_output, index1 * D, kept1, b_output1 - b_lambda[:, None] * b_output2, D, BLOCK_D)

    @triton.jit
    def merge_splits(
        p_outputs, p_lse, index, count, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr
    ):
        """Merge the outputs of a map's splits in a row: their mean, weighted by their softmaxes' sums."""
        split = tl.arange(0, BLOCK_S)
        offsets = split * count + index
        b_lse = tl.load(p_lse + offsets, mask=split < splits, other=float("-inf"))
        b_max = tl.max(b_lse)
        b_weights = tl.exp2(b_lse - tl.where(b_max == float("-inf"), 0.0, b_max))
        b_sum = tl.sum(b_weights)
        b_outputs = load_tile(p_outputs, offsets * D, split < splits, D, BLOCK_D)
        return tl.sum(b_weights[:, None] * b_outputs, 0) / tl.where(b_sum > 0, b_sum, 1.0)

    @triton.jit(do_not_specialize=["splits"])
    def combine_kernel(
        p_outputs, p_lse, p_lambda, p_output, stride_lambda, splits,
        D: tl.constexpr, SIGNALS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        """Combine one signal's output from the outputs that `forward_kernel` stored for splits and maps."""
        index = tl.program_id(0).to(tl.int64)
        maps = index // SIGNALS * (SIGNALS + 1)  # the first map of its group
        count = tl.num_programs(0).to(tl.int64) // SIGNALS * (SIGNALS + 1)
        b_output1 = merge_splits(p_outputs, p_lse, maps + index % SIGNALS, count, splits, D, BLOCK_D, BLOCK_S)
        b_output2 = merge_splits(p_outputs, p_lse, maps + SIGNALS, count, splits, D, BLOCK_D, BLOCK_S)
        b_lambda = tl.load(p_lambda + index * stride_lambda)
        columns = tl.arange(0, BLOCK_D)
        tl.store(p_output + index * D + columns, b_output1 - b_lambda * b_output2, mask=columns < D)

    @triton.jit
    def delta_kernel(
        p_grad, p_outputs, p_delta, count, D: tl.constexpr, SIGNALS: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_M: tl.constexpr,
    ):  # fmt: skip
        """Compute δ of signals and δ_noise, [2, b, n, s]: Σ over D of dO times a signal's output, and its noise's."""
        index = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        kept = index < count
        b_grad = load_tile(p_grad, index * D, kept, D, BLOCK_D).to(tl.float32)
        maps = index // SIGNALS * (SIGNALS + 1)
        b_output1 = load_tile(p_outputs, (maps + index % SIGNALS) * D, kept, D, BLOCK_D).to(tl.float32)
        b_output2 = load_tile(p_outputs, (maps + SIGNALS) * D, kept, D, BLOCK_D).to(tl.float32)
        tl.store(p_delta + index, tl.sum(b_grad * b_output1, 1), mask=kept)
        tl.store(p_delta + index + count, tl.sum(b_grad * b_output2, 1), mask=kept)

    @triton.jit
    def softmax_map(b_left, b_right, visible, b_lse, scale):
        """Compute P of one map, with queries left and keys right, or transposed, with keys left and queries right."""
        b_exponents = tl.dot(b_left, tl.trans(b_right), input_precision="ieee") * scale - b_lse
        if visible is not None:
            b_exponents = tl.where(visible, b_exponents, float("-inf"))
        return tl.exp2(b_exponents)

    @triton.jit
    def map_gradient(b_left, b_right, visible):
        """Compute dP of one map, with dO left and values right, or transposed; 0 where not visible, even for NaN."""
        b_grad_map = tl.dot(b_left, tl.trans(b_right), input_precision="ieee")
        if visible is not None:
            b_grad_map = tl.where(visible, b_grad_map, 0.0)
        return b_grad_map

    @triton.jit(do_not_specialize=["n", "m"])
    def query_gradient_kernel(
        p_query, p_key, p_value, p_lambda, p_bounds, p_grad, p_lse, p_delta, p_grad_query,
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
        stride_gb, stride_gh, stride_gn, stride_lambda, n, m, scale, scaling,
        D: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, SIGNALS: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """Compute dQ of rows of one key/value head, zeros in the padded halves of V1's queries.

        dS_noise = -P_noise∘(dP_noise - Σ λ δ_noise), where dP_noise = (Σ λ dO) Vᵀ is a product of its own; but if
        there is one signal, it is -λ P_noise∘(dP - δ_noise), with that signal's dP.
        """
        batch, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        kept1, tokens1, groups1, signals, index1 = query_rows(block * BLOCK_M, n, GROUPS, BLOCK_M, SIGNALS, BLOCK_R)
        kept2, tokens2, groups2, _, index2 = query_rows(block * BLOCK_M, n, GROUPS, BLOCK_M, 1, 1)
        start1, end1 = seen_keys(p_bounds, tokens1, n, m)
        start2, end2 = seen_keys(p_bounds, tokens2, n, m)
        first, all_first, all_last, last = key_range(start2, end2, m, 0, 1, BLOCK_N)

        p_query += batch * stride_qb
        p_key += batch * stride_kb + kv_head * stride_kh
        p_value += batch * stride_vb + kv_head * stride_vh
        heads1, heads2 = groups1 * (SIGNALS + 1) + signals, groups2 * (SIGNALS + 1) + SIGNALS
        b_query1 = load_tile(p_query, tokens1.to(tl.int64) * stride_qn + heads1 * stride_qh, kept1, W, BLOCK_W)
        queries2 = tokens2.to(tl.int64) * stride_qn + heads2 * stride_qh
        b_query2 = load_tile(p_query + (D - W), queries2, kept2, W, BLOCK_W)
        b_lse1 = tl.load(p_lse + index1 * (SIGNALS + 1) + signals)
        b_lse2 = tl.load(p_lse + index2 * (SIGNALS + 1) + SIGNALS)
        index1 = index1 * SIGNALS + signals
        b_grad = load_tile(p_grad, index1 * D, kept1, D, BLOCK_D)
        b_delta1 = tl.load(p_delta + index1)
        count = tl.num_programs(2).to(tl.int64) * n * tl.num_programs(1) * GROUPS * SIGNALS
        b_delta2 = tl.load(p_delta + index1 + count)
        b_lambda = tl.load(p_lambda + index1 * stride_lambda)
        if SIGNALS > 1:
            b_grad2 = tl.reshape(b_lambda[:, None] * b_grad, [BLOCK_M, BLOCK_R, BLOCK_D])  # 0 in rows that do not exist
            b_grad2 = tl.sum(b_grad2, 1).to(b_grad.dtype)
            b_delta2 = tl.where(kept1, b_lambda * b_delta2, 0.0)
            b_delta2 = tl.sum(tl.reshape(b_delta2, [BLOCK_M, BLOCK_R]), 1)
        b_grad_query1 = tl.zeros([BLOCK_M * BLOCK_R, BLOCK_W], tl.float32)
        b_grad_query2 = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)

        FIRST_PART: tl.constexpr = 1 if p_bounds is None else 0
        for part in tl.static_range(FIRST_PART, 3):
            if part == 0:
                part_first, part_last = first, all_first
            elif part == 1:
                part_first, part_last = all_first, all_last
            else:
                part_first, part_last = all_last, last
            for key in range(part_first, part_last, BLOCK_N):
                columns = tl.arange(0, BLOCK_N)
                if part == 1:
                    inside, seen1, seen2 = None, None, None
                else:
                    inside = key + columns < last
                    seen1 = (key + columns >= start1[:, None]) & (key + columns < end1[:, None])
                    seen2 = (key + columns >= start2[:, None]) & (key + columns < end2[:, None])
                p_key_tile = p_key + tl.cast(key, tl.int64) * stride_kn
                p_value_tile = p_value + tl.cast(key, tl.int64) * stride_vn
                b_key1 = load_tile(p_key_tile, columns * stride_kn, inside, W, BLOCK_W)
                b_key2 = b_key1 if W == D else load_tile(p_key_tile + W, columns * stride_kn, inside, W, BLOCK_W)
                b_value = load_tile(p_value_tile, columns * stride_vn, inside, D, BLOCK_D)
                b_grad_map1 = map_gradient(b_grad, b_value, seen1)
                b_grad_map2 = b_grad_map1 if SIGNALS == 1 else map_gradient(b_grad2, b_value, seen2)
                b_map = softmax_map(b_query1, b_key1, seen1, b_lse1[:, None], scale)
                b_grad_scores = (b_map * (b_grad_map1 - b_delta1[:, None])).to(b_key1.dtype)
                b_grad_query1 = tl.dot(b_grad_scores, b_key1, b_grad_query1, input_precision="ieee")
                b_map = softmax_map(b_query2, b_key2, seen2, b_lse2[:, None], scale)
                b_grad_scores = (b_map * (b_grad_map2 - b_delta2[:, None])).to(b_key2.dtype)
                b_grad_query2 = tl.dot(b_grad_scores, b_key2, b_grad_query2, input_precision="ieee")

        p_grad_query += batch * stride_gb
        queries1 = tokens1.to(tl.int64) * stride_gn + heads1 * stride_gh
        queries2 = tokens2.to(tl.int64) * stride_gn + heads2 * stride_gh
        store_tile(p_grad_query, queries1, kept1, b_grad_query1 * scaling, W, BLOCK_W)
        b_grad_query2 *= -b_lambda[:, None] * scaling if SIGNALS == 1 else -scaling
        store_tile(p_grad_query + (D - W), queries2, kept2, b_grad_query2, W, BLOCK_W)
        if W < D:
            store_tile(p_grad_query + W, queries1, kept1, tl.zeros_like(b_grad_query1), W, BLOCK_W)
            store_tile(p_grad_query, queries2, kept2, tl.zeros_like(b_grad_query2), W, BLOCK_W)

    @triton.jit(do_not_specialize=["n", "m"])
    def key_value_gradient_kernel(
        p_query, p_key, p_value, p_lambda, p_bounds, p_grad, p_lse, p_delta, p_grad_key, p_grad_value,
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
        stride_gb, stride_gh, stride_gn, stride_lambda, n, m, scale, scaling,
        D: tl.constexpr, W: tl.constexpr, GROUPS: tl.constexpr, SIGNALS: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ):  # fmt: skip
        """Compute dK and dV of a block of keys from all rows that see one of them, signal by signal.

        Maps are transposed here, [BLOCK_N, BLOCK_M], for the products with dO and with the queries.
        """
        batch, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
        first_key = tl.program_id(0) * BLOCK_N
        keys = first_key + tl.arange(0, BLOCK_N)
        if p_bounds is None:
            first = tl.maximum(first_key - (m - n), 0)
            last = n
            all_first = tl.maximum(first_key + BLOCK_N - 1 - (m - n), 0)  # all tokens from this one on see all keys
        else:
            first, last = n, 0
            for token in range(0, n, BLOCK_TOKENS):
                tokens = tl.minimum(token + tl.arange(0, BLOCK_TOKENS), n - 1)
                start, end = seen_keys(p_bounds, tokens, n, m)
                sees = (start < end) & (start < first_key + BLOCK_N) & (end > first_key)
                first = tl.minimum(first, tl.min(tl.where(sees, tokens, n)))
                last = tl.maximum(last, tl.max(tl.where(sees, tokens + 1, 0)))
            all_first = last
        first, last = first * GROUPS, last * GROUPS  # rows
        all_first = first + tl.cdiv(tl.maximum(all_first * GROUPS - first, 0), BLOCK_M) * BLOCK_M

        p_query += batch * stride_qb
        p_key += batch * stride_kb + kv_head * stride_kh
        p_value += batch * stride_vb + kv_head * stride_vh
        offsets = keys.to(tl.int64) * stride_kn
        b_key1 = load_tile(p_key, offsets, keys < m, W, BLOCK_W)
        b_key2 = b_key1 if W == D else load_tile(p_key + W, offsets, keys < m, W, BLOCK_W)
        b_value = load_tile(p_value, keys.to(tl.int64) * stride_vn, keys < m, D, BLOCK_D)
        count = tl.num_programs(2).to(tl.int64) * n * tl.num_programs(1) * GROUPS * SIGNALS
        b_grad_key1 = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
        b_grad_key2 = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
        b_grad_value = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

        PARTS: tl.constexpr = 2 if p_bounds is None else 1
        for part in tl.static_range(PARTS):
            if part == 0:
                part_first, part_last = first, tl.minimum(all_first, last)
            else:
                part_first, part_last = all_first, last
            for row in range(part_first, part_last, BLOCK_M):
                kept, tokens, groups, _, index = query_rows(row, n, GROUPS, BLOCK_M, 1, 1)
                if part == 0:
                    start, end = seen_keys(p_bounds, tokens, n, m)
                    visible = (keys[:, None] >= start) & (keys[:, None] < end)
                else:
                    visible = None
                queries = tokens.to(tl.int64) * stride_qn + groups * (SIGNALS + 1) * stride_qh
                p_lse_group = p_lse + index * (SIGNALS + 1)
                b_query2 = load_tile(p_query + (D - W), queries + SIGNALS * stride_qh, kept, W, BLOCK_W)
                b_lse = tl.load(p_lse_group + SIGNALS, mask=kept, other=float("inf"))  # which makes a map 0
                b_map2 = softmax_map(b_key2, b_query2, visible, b_lse[None, :], scale)
                b_grad_scores2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for signal in range(SIGNALS):
                    head = index * SIGNALS + signal
                    b_query1 = load_tile(p_query, queries + signal * stride_qh, kept, W, BLOCK_W)
                    b_grad = load_tile(p_grad, head * D, kept, D, BLOCK_D)
                    b_lse = tl.load(p_lse_group + signal, mask=kept, other=float("inf"))
                    b_delta1, b_delta2 = tl.load(p_delta + head)[None, :], tl.load(p_delta + head + count)[None, :]
                    b_lambda = tl.load(p_lambda + head * stride_lambda)[None, :]
                    b_grad_map = map_gradient(b_value, b_grad, visible)
                    b_map1 = softmax_map(b_key1, b_query1, visible, b_lse[None, :], scale)
                    b_map = (b_map1 - b_lambda * b_map2).to(b_grad.dtype)
                    b_grad_value = tl.dot(b_map, b_grad, b_grad_value, input_precision="ieee")
                    b_grad_scores1 = (b_map1 * (b_grad_map - b_delta1)).to(b_query1.dtype)
                    b_grad_scores2 -= b_lambda * (b_map2 * (b_grad_map - b_delta2))
                    b_grad_key1 = tl.dot(b_grad_scores1, b_query1, b_grad_key1, input_precision="ieee")
                b_grad_scores2 = b_grad_scores2.to(b_query2.dtype)
                if W == D:
                    b_grad_key1 = tl.dot(b_grad_scores2, b_query2, b_grad_key1, input_precision="ieee")
                else:
                    b_grad_key2 = tl.dot(b_grad_scores2, b_query2, b_grad_key2, input_precision="ieee")

        offsets = batch * stride_gb + kv_head * stride_gh + keys.to(tl.int64) * stride_gn
        store_tile(p_grad_key, offsets, keys < m, b_grad_key1 * scaling, W, BLOCK_W)
        if W < D:
            store_tile(p_grad_key + W, offsets, keys < m, b_grad_key2 * scaling, W, BLOCK_W)
        store_tile(p_grad_value, offsets, keys < m, b_grad_value, D, BLOCK_D)


def block_sizes(
    kernel: str, map_dim: int, head_dim: int, dtype: torch.dtype, rows: int, signals_per_noise: int
) -> dict[str, int]:
    """Return tile sizes, warps and pipeline stages of a kernel.

    For Hopper (227 KB of shared memory, 255 registers for a thread) and not yet measured: by arithmetic, accumulators,
    at r = 1 two [BLOCK_M, D], take at most 128 of a thread's registers up to r = 4, and tiles in flight fit shared
    memory. As compiled, inner loops of D up to 128 keep all but a few numbers in registers, wider ones spill, and so
    does float32's dQ of several signals.

    Args:
        kernel: `"forward"`, `"query_gradient"` or `"key_value_gradient"`.
        map_dim: width of one map's query and key.
        head_dim: D.
        dtype: of queries, keys and values.
        rows: number of rows of a key/value head. Few rows get a smaller tile.
        signals_per_noise: r. The signals of a row are side by side in a tile, which then has fewer rows.
    """
    wide = head_dim > 128
    few = max(16, triton.next_power_of_2(rows))
    if dtype == torch.float32:  # no tensor cores
        block_m, block_n, warps, stages = (16, 32, 8, 1) if wide else (32, 32, 8, 1)
    elif kernel == "forward" and few <= 32:  # decoding: keys in flight count
        block_m, block_n, warps, stages = (few, 64, 8, 2) if wide else (few, 64, 4, 3)
    elif kernel == "forward":
        block_m, block_n, warps, stages = (64, 32, 8, 2) if wide else (128, 64, 8, 2)
    elif kernel == "query_gradient":
        block_m, block_n, warps, stages = (64, 32, 8, 2) if map_dim > 64 else (64, 64, 8, 2)
    else:
        block_m, block_n, warps, stages = (32, 64, 8, 2)
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
    if kernel != "key_value_gradient":
        sizes["BLOCK_R"] = triton.next_power_of_2(signals_per_noise)
        sizes["BLOCK_M"] = min(max(16, block_m // sizes["BLOCK_R"]), few)
    return sizes


def split_count(m: int, programs: int, processors: int) -> int:
    """Return the number of programs that share a row's m keys: two per processor in all, each with 256 or more keys."""
    return max(1, min(2 * processors // programs, m // 256, 64))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    map_dim: int,
    signals_per_noise: int,
) -> dict[str, Any]:
    """Return the arguments of all kernels on rows besides pointers: strides, n, m and widths."""
    d = query.shape[-1]
    return {
        **dict(zip(("stride_qb", "stride_qh", "stride_qn"), query.stride(), strict=False)),
        **dict(zip(("stride_kb", "stride_kh", "stride_kn"), key.stride(), strict=False)),
        **dict(zip(("stride_vb", "stride_vh", "stride_vn"), value.stride(), strict=False)),
        "stride_lambda": int(differential_lambda.numel() > 1),
        "n": query.shape[2],
        "m": key.shape[2],
        "D": d,
        "W": map_dim,
        "GROUPS": query.shape[1] // (signals_per_noise + 1) // key.shape[1],
        "SIGNALS": signals_per_noise,
        "BLOCK_D": triton.next_power_of_2(d),
        "BLOCK_W": triton.next_power_of_2(map_dim),
        **OPTIONS,
    }


@torch.library.custom_op(f"{_NAMESPACE}::forward", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    bounds: torch.Tensor | None,
    map_dim: int,
    scaling: float,
    signals_per_noise: int,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the output [b, n, s, D], and with `save` also the maps' outputs [b, n, H, D] and sums [b, n, H]."""
    output, outputs, lse = _empty_outputs(query, signals_per_noise, save)
    b, heads, n, d = query.shape
    kv_heads, m, rows = key.shape[1], key.shape[2], n * heads // (signals_per_noise + 1) // key.shape[1]
    differential_lambda = differential_lambda.contiguous()
    arguments = _arguments(query, key, value, differential_lambda, map_dim, signals_per_noise)
    blocks = block_sizes("forward", map_dim, d, query.dtype, rows, signals_per_noise)
    programs = triton.cdiv(rows, blocks["BLOCK_M"]) * kv_heads * b
    splits = 1 if save or n > DECODING_TOKENS else split_count(m, programs, _processors(query.device))
    if splits > 1:
        outputs = query.new_empty(splits, b, n, heads, d, dtype=torch.float32)
        lse = query.new_empty(splits, b, n, heads, dtype=torch.float32)
    with torch.cuda.device_of(query):
        forward_kernel[triton.cdiv(rows, blocks["BLOCK_M"]) * splits, kv_heads, b](
            query,
            key,
            value,
            differential_lambda,
            None if bounds is None else bounds.contiguous(),
            output if splits == 1 else None,
            outputs if save or splits > 1 else None,
            lse if save or splits > 1 else None,
            splits=splits,
            scale=scaling * LOG2_E,
            **arguments,
            **blocks,
        )
        if splits > 1:
            combine_kernel[(b * n * output.shape[2],)](
                outputs,
                lse,
                differential_lambda,
                output,
                arguments["stride_lambda"],
                splits,
                D=d,
                SIGNALS=signals_per_noise,
                BLOCK_D=arguments["BLOCK_D"],
                BLOCK_S=triton.next_power_of_2(splits),
                **OPTIONS,
            )
            outputs, lse = _empty_outputs(query, signals_per_noise, save)[1:]
    return output, outputs, lse


def _empty_outputs(
    query: torch.Tensor, signals_per_noise: int, save: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, heads, n, d = query.shape
    saved = (b, n, heads) if save else (0,)
    return (
        query.new_empty(b, n, heads // (signals_per_noise + 1) * signals_per_noise, d),
        query.new_empty(*saved, d),
        query.new_empty(saved, dtype=torch.float32),
    )


@_forward.register_fake
def _forward_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    bounds: torch.Tensor | None,
    map_dim: int,
    scaling: float,
    signals_per_noise: int,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_outputs(query, signals_per_noise, save)


@torch.library.custom_op(f"{_NAMESPACE}::backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    bounds: torch.Tensor | None,
    outputs: torch.Tensor,
    lse: torch.Tensor,
    map_dim: int,
    scaling: float,
    signals_per_noise: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of queries, keys, values and λ."""
    grads = _empty_gradients(query, key, differential_lambda)
    grad_query, grad_key, grad_value, _ = grads
    b, n, signals, d = grad.shape
    kv_heads, m, rows = key.shape[1], key.shape[2], n * signals // signals_per_noise // key.shape[1]
    grad, differential_lambda = grad.contiguous(), differential_lambda.contiguous()
    bounds = None if bounds is None else bounds.contiguous()
    arguments = _arguments(query, key, value, differential_lambda, map_dim, signals_per_noise)
    arguments |= {"scale": scaling * LOG2_E, "scaling": scaling}
    delta = lse.new_empty(2, b, n, signals)
    pointers = query, key, value, differential_lambda, bounds, grad, lse, delta
    with torch.cuda.device_of(query):
        delta_kernel[(triton.cdiv(b * n * signals, 16),)](
            grad,
            outputs,
            delta,
            b * n * signals,
            D=d,
            SIGNALS=signals_per_noise,
            BLOCK_D=arguments["BLOCK_D"],
            BLOCK_M=16,
            **OPTIONS,
        )
        blocks = block_sizes("query_gradient", map_dim, d, query.dtype, rows, signals_per_noise)
        strides = dict(zip(("stride_gb", "stride_gh", "stride_gn"), grad_query.stride(), strict=False))
        query_gradient_kernel[triton.cdiv(rows, blocks["BLOCK_M"]), kv_heads, b](
            *pointers, grad_query, **arguments, **strides, **blocks
        )
        blocks = block_sizes("key_value_gradient", map_dim, d, query.dtype, rows, signals_per_noise)
        strides = dict(zip(("stride_gb", "stride_gh", "stride_gn"), grad_key.stride(), strict=False))
        key_value_gradient_kernel[triton.cdiv(m, blocks["BLOCK_N"]), kv_heads, b](
            *pointers, grad_key, grad_value, **arguments, **strides, **blocks, BLOCK_TOKENS=256
        )
    delta2 = delta[1].unsqueeze(-1)
    grad_lambda = -delta2 if differential_lambda.dim() > 1 else -delta2.sum().reshape(1)
    return grad_query, grad_key, grad_value, grad_lambda


def _empty_gradients(
    query: torch.Tensor, key: torch.Tensor, differential_lambda: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the gradients of queries, keys, values and λ, with adjacent heads as in projections' memory layout."""
    like_query, like_key, like_value = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (query, key, key))
    return like_query, like_key, like_value, differential_lambda.new_empty(differential_lambda.shape)


@_backward.register_fake
def _backward_shapes(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    bounds: torch.Tensor | None,
    outputs: torch.Tensor,
    lse: torch.Tensor,
    map_dim: int,
    scaling: float,
    signals_per_noise: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_gradients(query, key, differential_lambda)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.options = inputs[5:8]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)


def triton_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    bounds: torch.Tensor | None,
    map_dim: int,
    scaling: float,
    signals_per_noise: int,
) -> torch.Tensor:
    """Compute (softmax(Q1 K1ᵀ·scaling) - λ softmax(Q2 K2ᵀ·scaling)) V (arXiv 2410.05258, equation 1).

    r signals Q1 share one noise Q2 (arXiv 2510.06949).

    Inputs may have any strides if the last dimension is contiguous. Keys and values outside of the intervals of all
    queries have no effect, even if they are NaN.

    Args:
        query: [b, H, n, D], float16, bfloat16 or float32, in groups of r signals and their noise.
        key: [b, h_kv, m, D] in the same dtype. h_kv divides the number of groups; the groups of a key/value head are
            consecutive.
        value: [b, h_kv, m, D] in the same dtype.
        differential_lambda: λ in float32, [1] or [b, n, s, 1].
        bounds: [b, 1, n, 2] in int32, the half-open interval of keys that each query sees. If it is empty, outputs and
            gradients are 0. `None`: causal, the last query sees the last key.
        map_dim: width of one map's query and key. D: the whole width (V2). D/2: signals use the first half, the noise
            the second half; the other halves of queries are not read, and their gradients are 0 (V1).
        scaling: factor of the scores before the softmax, positive.
        signals_per_noise: r.

    Returns:
        [b, n, s, D] in the queries' dtype, subtracted in float32.

    Raises:
        `ImportError`: triton is not installed.
        `ValueError`: a shape, dtype or stride is wrong. The message has the rule and the value received.
    """
    if not HAS_TRITON:
        raise ImportError("triton_attention needs triton, which comes with CUDA builds of torch.")
    _check(query, key, value, differential_lambda, bounds, map_dim, scaling, signals_per_noise)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, differential_lambda))
    return _forward(query, key, value, differential_lambda, bounds, map_dim, scaling, signals_per_noise, save)[0]


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    bounds: torch.Tensor | None,
    map_dim: int,
    scaling: float,
    signals_per_noise: int,
) -> None:
    """Raise `ValueError` unless the inputs are as `triton_attention` requires."""
    b, heads, n, d = query.shape
    kv_heads, m = key.shape[1:3]
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"Queries, keys and values must be of one dtype, float16, bfloat16 or float32, got {query.dtype}, "
            f"{key.dtype} and {value.dtype}."
        )
    if signals_per_noise < 1:
        raise ValueError(f"signals_per_noise must be at least 1, got {signals_per_noise}.")
    groups, rest = divmod(heads, signals_per_noise + 1)
    if rest or groups % kv_heads or key.shape != (b, kv_heads, m, d) or value.shape != key.shape:
        raise ValueError(
            "Queries must be [b, H, n, D], keys and values [b, h_kv, m, D], with H divisible by h_kv·(r + 1), got r = "
            f"{signals_per_noise}, {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if not 32 <= d <= 256 or map_dim not in (d, d // 2) or d % 2:
        raise ValueError(f"D must be even, from 32 to 256, and map_dim D or D/2, got {d} and {map_dim}.")
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        raise ValueError("The last dimension of queries, keys and values must be contiguous.")
    shape = tuple(differential_lambda.shape)
    signals = groups * signals_per_noise
    if differential_lambda.dtype != torch.float32 or shape not in ((1,), (b, n, signals, 1)):
        raise ValueError(
            f"λ must be float32, [1] or [b, n, s, 1] = {[b, n, signals, 1]}, got {differential_lambda.dtype}, "
            f"{list(shape)}."
        )
    if bounds is None and n > m:
        raise ValueError(f"Without bounds there must be a key for each of the {n} queries, got {m} keys.")
    if bounds is not None and (bounds.dtype != torch.int32 or bounds.shape != (b, 1, n, 2)):
        raise ValueError(
            f"Bounds must be int32, [b, 1, n, 2] = {[b, 1, n, 2]}, got {bounds.dtype}, {list(bounds.shape)}."
        )
    if not scaling > 0:
        raise ValueError(f"The scaling must be positive, got {scaling}.")
