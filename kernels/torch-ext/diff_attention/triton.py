# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Fused kernels for differential attention, in Triton: (softmax(Q1 K1ᵀ) - λ softmax(Q2 K2ᵀ)) V without the maps.

Both maps of a head are computed against one tile of values, which is read once, with an online softmax for each. In
units of n²d multiplications and additions (d = D/2; arXiv 2410.05258, section 2.1), V1's forward takes 6: QKᵀ 2, PV 4.
Its backward takes 10 if each product is computed once: QKᵀ 2, and 2 each for dP = dO Vᵀ, which both maps share, for
dV = (P1 - λP2)ᵀ dO, for dQ and for dK. Two kernels without atomics, one for dQ and one for dK and dV, recompute QKᵀ
and dP and take 14; they give equal bits in every run.

With δ = Σ dO∘O over a row, for each map: dS1 = P1∘(dP - δ1), dS2 = -λ P2∘(dP - δ2), dλ = -δ2. So a backward needs
from its forward the maps' outputs O1 and O2 and the logarithms of their softmaxes' sums.

Letters in shapes: b batch, n tokens with a query, m keys, h differential heads, h_kv key/value heads, D width of
values. A program works on rows of one key/value head: a row is a token's query, both maps of it, in one of the heads
that share keys and values. Rows are counted token by token, so that a program reads keys once for all these heads, and
a step of decoding fills one tile.
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
"""Of the compiler: x·y + z is one instruction. Triton's default will change."""

DECODING_TOKENS = 16
"""Up to so many tokens with a query, several programs share the keys of a row if processors would be idle."""

_NAMESPACE = re.sub(r"\W", "_", __name__)  # this file may be imported as a package's and as remote code


if HAS_TRITON:

    @triton.jit
    def load_tile(pointer, offsets, kept, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """Rows of WIDTH numbers at `offsets`; zeros in rows that are not `kept` (None: all are) and up to BLOCK."""
        columns = tl.arange(0, BLOCK)[None, :]
        inside = columns < WIDTH
        if kept is not None:
            inside = inside & kept[:, None]
        return tl.load(pointer + offsets[:, None] + columns, mask=inside, other=0.0)

    @triton.jit
    def store_tile(pointer, offsets, kept, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """Writes what `load_tile` reads."""
        columns = tl.arange(0, BLOCK)[None, :]
        tl.store(pointer + offsets[:, None] + columns, tile, mask=kept[:, None] & (columns < WIDTH))

    @triton.jit
    def query_rows(first, n, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
        """BLOCK_M rows: which exist, their tokens and heads, and their index in tensors [b, n, h].

        Rows that do not exist repeat the last one.
        """
        rows = first + tl.arange(0, BLOCK_M)
        kept = rows < n * GROUP
        rows = tl.minimum(rows, n * GROUP - 1)
        tokens = rows // GROUP
        heads = (tl.program_id(1) * GROUP + rows % GROUP).to(tl.int64)
        index = (tl.program_id(2).to(tl.int64) * n + tokens) * (tl.num_programs(1) * GROUP) + heads
        return kept, tokens, heads, index

    @triton.jit
    def seen_keys(p_bounds, tokens, n, m):
        """The half-open intervals of keys that tokens see."""
        if p_bounds is None:
            start, end = tokens * 0, tokens + (m - n + 1)
        else:
            p_bounds += (tl.program_id(2).to(tl.int64) * n + tokens) * 2
            start, end = tl.maximum(tl.load(p_bounds), 0), tl.minimum(tl.load(p_bounds + 1), m)
        return start, end

    @triton.jit
    def key_range(start, end, m, split, splits, BLOCK_N: tl.constexpr):
        """[first, last) of the keys that any row sees, a part of it if they are split; between `all_first` and
        `all_last`, whole blocks from `first` on, all rows see all of them."""
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
        """One more tile of keys and values in the online softmax of one map. `visible` is None where all keys are."""
        b_scores = tl.dot(b_query, tl.trans(b_key), input_precision="ieee")
        if visible is not None:
            b_scores = tl.where(visible, b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, 1))
        b_shift = b_new_max * scale
        if visible is not None:
            b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_shift)  # a row that has seen no key yet
        b_weights = tl.exp2(b_scores * scale - b_shift[:, None])
        b_decay = tl.exp2(b_max * scale - b_shift)
        b_sum = b_sum * b_decay + tl.sum(b_weights, 1)
        b_output = tl.dot(b_weights.to(b_value.dtype), b_value, b_output * b_decay[:, None], input_precision="ieee")
        return b_new_max, b_sum, b_output

    @triton.jit
    def normalised(b_max, b_sum, b_output, scale):
        """A map's output, and the logarithm of its sum to base 2; 0 and -∞ for rows that saw no key."""
        b_sum = tl.where(b_sum > 0, b_sum, 1.0)
        return b_output / b_sum[:, None], b_max * scale + tl.log2(b_sum)

    @triton.jit(do_not_specialize=["n", "m", "splits"])
    def forward_kernel(
        p_query, p_key, p_value, p_lambda, p_bounds, p_output, p_outputs, p_lse,
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
        stride_lambda, n, m, splits, scale,
        D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """Rows of one key/value head against their keys, or one of `splits` parts of these.

        Writes the combined output [b, n, h, D] if there is a `p_output`; the maps' outputs [splits, 2, b, n, h, D] and
        the logarithms of their sums [splits, 2, b, n, h] if there are such pointers.
        """
        batch, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
        split = tl.program_id(0) % splits
        block = (tl.num_programs(0) - 1 - tl.program_id(0)) // splits  # the longest causal rows first
        kept, tokens, heads, index = query_rows(block * BLOCK_M, n, GROUP, BLOCK_M)
        start, end = seen_keys(p_bounds, tokens, n, m)
        first, all_first, all_last, last = key_range(start, end, m, split, splits, BLOCK_N)

        p_query += batch * stride_qb
        p_key += batch * stride_kb + kv_head * stride_kh
        p_value += batch * stride_vb + kv_head * stride_vh
        queries = tokens.to(tl.int64) * stride_qn + 2 * heads * stride_qh
        b_query1 = load_tile(p_query, queries, kept, W, BLOCK_W)
        b_query2 = load_tile(p_query + (D - W), queries + stride_qh, kept, W, BLOCK_W)
        b_max1 = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_max2 = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum1 = tl.zeros([BLOCK_M], tl.float32)
        b_sum2 = tl.zeros([BLOCK_M], tl.float32)
        b_output1 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
                    inside, visible = None, None
                else:
                    inside = key + columns < last  # beyond it there may be anything
                    visible = (key + columns >= start[:, None]) & (key + columns < end[:, None])
                p_key_tile = p_key + tl.cast(key, tl.int64) * stride_kn
                p_value_tile = p_value + tl.cast(key, tl.int64) * stride_vn
                b_key1 = load_tile(p_key_tile, columns * stride_kn, inside, W, BLOCK_W)
                b_key2 = b_key1 if W == D else load_tile(p_key_tile + W, columns * stride_kn, inside, W, BLOCK_W)
                b_value = load_tile(p_value_tile, columns * stride_vn, inside, D, BLOCK_D)
                b_max1, b_sum1, b_output1 = attend(b_query1, b_key1, b_value, visible, b_max1, b_sum1, b_output1, scale)
                b_max2, b_sum2, b_output2 = attend(b_query2, b_key2, b_value, visible, b_max2, b_sum2, b_output2, scale)

        b_output1, b_lse1 = normalised(b_max1, b_sum1, b_output1, scale)
        b_output2, b_lse2 = normalised(b_max2, b_sum2, b_output2, scale)
        if p_output is not None:
            b_lambda = tl.load(p_lambda + index * stride_lambda)
            store_tile(p_output, index * D, kept, b_output1 - b_lambda[:, None] * b_output2, D, BLOCK_D)
        if p_outputs is not None:
            count = tl.num_programs(2).to(tl.int64) * n * tl.num_programs(1) * GROUP
            index1 = 2 * split * count + index
            store_tile(p_outputs, index1 * D, kept, b_output1, D, BLOCK_D)
            store_tile(p_outputs, (index1 + count) * D, kept, b_output2, D, BLOCK_D)
            tl.store(p_lse + index1, b_lse1, mask=kept)
            tl.store(p_lse + index1 + count, b_lse2, mask=kept)

    @triton.jit
    def merge_splits(
        p_outputs, p_lse, index, count, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr
    ):
        """One map's output of a row, of the outputs of its splits: their mean, weighted by their softmaxes' sums."""
        split = tl.arange(0, BLOCK_S)
        offsets = 2 * split * count + index
        b_lse = tl.load(p_lse + offsets, mask=split < splits, other=float("-inf"))
        b_max = tl.max(b_lse)
        b_weights = tl.exp2(b_lse - tl.where(b_max == float("-inf"), 0.0, b_max))
        b_sum = tl.sum(b_weights)
        b_outputs = load_tile(p_outputs, offsets * D, split < splits, D, BLOCK_D)
        return tl.sum(b_weights[:, None] * b_outputs, 0) / tl.where(b_sum > 0, b_sum, 1.0)

    @triton.jit(do_not_specialize=["splits"])
    def combine_kernel(
        p_outputs, p_lse, p_lambda, p_output, stride_lambda, splits,
        D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    ):  # fmt: skip
        """One row's combined output of the outputs that `forward_kernel` wrote for its splits and maps."""
        index, count = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
        b_output1 = merge_splits(p_outputs, p_lse, index, count, splits, D, BLOCK_D, BLOCK_S)
        b_output2 = merge_splits(p_outputs, p_lse, index + count, count, splits, D, BLOCK_D, BLOCK_S)
        b_lambda = tl.load(p_lambda + index * stride_lambda)
        columns = tl.arange(0, BLOCK_D)
        tl.store(p_output + index * D + columns, b_output1 - b_lambda * b_output2, mask=columns < D)

    @triton.jit
    def delta_kernel(p_grad, p_outputs, p_delta, count, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
        """δ1 and δ2, [2, b, n, h]: sums over D of dO times each map's output."""
        index = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        kept = index < count
        b_grad = load_tile(p_grad, index * D, kept, D, BLOCK_D).to(tl.float32)
        for map in tl.static_range(2):
            b_output = load_tile(p_outputs, (index + map * count) * D, kept, D, BLOCK_D).to(tl.float32)
            tl.store(p_delta + index + map * count, tl.sum(b_grad * b_output, 1), mask=kept)

    @triton.jit
    def map_gradient(b_left, b_right, b_grad_map, visible, b_lse, b_delta, scale):
        """P and P∘(dP - δ) of one map, queries left and keys right, or transposed: keys left and queries right."""
        b_exponents = tl.dot(b_left, tl.trans(b_right), input_precision="ieee") * scale - b_lse
        if visible is not None:
            b_exponents = tl.where(visible, b_exponents, float("-inf"))
            b_grad_map = tl.where(visible, b_grad_map, 0.0)  # NaN where values are
        b_map = tl.exp2(b_exponents)
        return b_map, b_map * (b_grad_map - b_delta)

    @triton.jit(do_not_specialize=["n", "m"])
    def query_gradient_kernel(
        p_query, p_key, p_value, p_lambda, p_bounds, p_grad, p_lse, p_delta, p_grad_query,
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
        stride_gb, stride_gh, stride_gn, stride_lambda, n, m, scale, scaling,
        D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """dQ of rows of one key/value head, zeros in the halves of V1's queries that are padding."""
        batch, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        kept, tokens, heads, index = query_rows(block * BLOCK_M, n, GROUP, BLOCK_M)
        start, end = seen_keys(p_bounds, tokens, n, m)
        first, all_first, all_last, last = key_range(start, end, m, 0, 1, BLOCK_N)

        p_query += batch * stride_qb
        p_key += batch * stride_kb + kv_head * stride_kh
        p_value += batch * stride_vb + kv_head * stride_vh
        queries = tokens.to(tl.int64) * stride_qn + 2 * heads * stride_qh
        b_query1 = load_tile(p_query, queries, kept, W, BLOCK_W)
        b_query2 = load_tile(p_query + (D - W), queries + stride_qh, kept, W, BLOCK_W)
        b_grad = load_tile(p_grad, index * D, kept, D, BLOCK_D)
        count = tl.num_programs(2).to(tl.int64) * n * tl.num_programs(1) * GROUP
        b_lse1, b_lse2 = tl.load(p_lse + index), tl.load(p_lse + index + count)
        b_delta1, b_delta2 = tl.load(p_delta + index), tl.load(p_delta + index + count)
        b_grad_query1 = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
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
                    inside, visible = None, None
                else:
                    inside = key + columns < last
                    visible = (key + columns >= start[:, None]) & (key + columns < end[:, None])
                p_key_tile = p_key + tl.cast(key, tl.int64) * stride_kn
                p_value_tile = p_value + tl.cast(key, tl.int64) * stride_vn
                b_key1 = load_tile(p_key_tile, columns * stride_kn, inside, W, BLOCK_W)
                b_key2 = b_key1 if W == D else load_tile(p_key_tile + W, columns * stride_kn, inside, W, BLOCK_W)
                b_value = load_tile(p_value_tile, columns * stride_vn, inside, D, BLOCK_D)
                b_grad_map = tl.dot(b_grad, tl.trans(b_value), input_precision="ieee")
                _, b_grad_scores = map_gradient(
                    b_query1, b_key1, b_grad_map, visible, b_lse1[:, None], b_delta1[:, None], scale
                )
                b_grad_query1 = tl.dot(b_grad_scores.to(b_key1.dtype), b_key1, b_grad_query1, input_precision="ieee")
                _, b_grad_scores = map_gradient(
                    b_query2, b_key2, b_grad_map, visible, b_lse2[:, None], b_delta2[:, None], scale
                )
                b_grad_query2 = tl.dot(b_grad_scores.to(b_key2.dtype), b_key2, b_grad_query2, input_precision="ieee")

        b_lambda = tl.load(p_lambda + index * stride_lambda)
        p_grad_query += batch * stride_gb
        queries = tokens.to(tl.int64) * stride_gn + 2 * heads * stride_gh
        store_tile(p_grad_query, queries, kept, b_grad_query1 * scaling, W, BLOCK_W)
        b_grad_query2 *= -b_lambda[:, None] * scaling
        store_tile(p_grad_query + (D - W), queries + stride_gh, kept, b_grad_query2, W, BLOCK_W)
        if W < D:
            b_zeros = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
            store_tile(p_grad_query + W, queries, kept, b_zeros, W, BLOCK_W)
            store_tile(p_grad_query, queries + stride_gh, kept, b_zeros, W, BLOCK_W)

    @triton.jit(do_not_specialize=["n", "m"])
    def key_value_gradient_kernel(
        p_query, p_key, p_value, p_lambda, p_bounds, p_grad, p_lse, p_delta, p_grad_key, p_grad_value,
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
        stride_gb, stride_gh, stride_gn, stride_lambda, n, m, scale, scaling,
        D: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ):  # fmt: skip
        """dK and dV of a block of keys, from all rows of their group that see one of them.

        Maps are transposed here, [BLOCK_N, BLOCK_M], for the products with dO and with the queries.
        """
        batch, kv_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
        first_key = tl.program_id(0) * BLOCK_N
        keys = first_key + tl.arange(0, BLOCK_N)
        if p_bounds is None:
            first = tl.maximum(first_key - (m - n), 0)
            last = n
            all_first = tl.maximum(first_key + BLOCK_N - 1 - (m - n), 0)  # from this token on all see all
        else:
            first, last = n, 0
            for token in range(0, n, BLOCK_TOKENS):
                tokens = tl.minimum(token + tl.arange(0, BLOCK_TOKENS), n - 1)
                start, end = seen_keys(p_bounds, tokens, n, m)
                sees = (start < end) & (start < first_key + BLOCK_N) & (end > first_key)
                first = tl.minimum(first, tl.min(tl.where(sees, tokens, n)))
                last = tl.maximum(last, tl.max(tl.where(sees, tokens + 1, 0)))
            all_first = last
        first, last = first * GROUP, last * GROUP  # rows
        all_first = first + tl.cdiv(tl.maximum(all_first * GROUP - first, 0), BLOCK_M) * BLOCK_M

        p_query += batch * stride_qb
        p_key += batch * stride_kb + kv_head * stride_kh
        p_value += batch * stride_vb + kv_head * stride_vh
        offsets = keys.to(tl.int64) * stride_kn
        b_key1 = load_tile(p_key, offsets, keys < m, W, BLOCK_W)
        b_key2 = b_key1 if W == D else load_tile(p_key + W, offsets, keys < m, W, BLOCK_W)
        b_value = load_tile(p_value, keys.to(tl.int64) * stride_vn, keys < m, D, BLOCK_D)
        count = tl.num_programs(2).to(tl.int64) * n * tl.num_programs(1) * GROUP
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
                kept, tokens, heads, index = query_rows(row, n, GROUP, BLOCK_M)
                if part == 0:
                    start, end = seen_keys(p_bounds, tokens, n, m)
                    visible = (keys[:, None] >= start) & (keys[:, None] < end)
                else:
                    visible = None
                queries = tokens.to(tl.int64) * stride_qn + 2 * heads * stride_qh
                b_query1 = load_tile(p_query, queries, kept, W, BLOCK_W)
                b_query2 = load_tile(p_query + (D - W), queries + stride_qh, kept, W, BLOCK_W)
                b_grad = load_tile(p_grad, index * D, kept, D, BLOCK_D)
                b_lse1 = tl.load(p_lse + index, mask=kept, other=float("inf"))  # with which a map is 0
                b_lse2 = tl.load(p_lse + index + count, mask=kept, other=float("inf"))
                b_delta1, b_delta2 = tl.load(p_delta + index), tl.load(p_delta + index + count)
                b_lambda = tl.load(p_lambda + index * stride_lambda)[None, :]
                b_grad_map = tl.dot(b_value, tl.trans(b_grad), input_precision="ieee")
                b_map1, b_grad_scores1 = map_gradient(
                    b_key1, b_query1, b_grad_map, visible, b_lse1[None, :], b_delta1[None, :], scale
                )
                b_map2, b_grad_scores2 = map_gradient(
                    b_key2, b_query2, b_grad_map, visible, b_lse2[None, :], b_delta2[None, :], scale
                )
                b_map = (b_map1 - b_lambda * b_map2).to(b_grad.dtype)
                b_grad_value = tl.dot(b_map, b_grad, b_grad_value, input_precision="ieee")
                b_grad_scores1 = b_grad_scores1.to(b_query1.dtype)
                b_grad_scores2 = (-b_lambda * b_grad_scores2).to(b_query2.dtype)
                b_grad_key1 = tl.dot(b_grad_scores1, b_query1, b_grad_key1, input_precision="ieee")
                if W == D:
                    b_grad_key1 = tl.dot(b_grad_scores2, b_query2, b_grad_key1, input_precision="ieee")
                else:
                    b_grad_key2 = tl.dot(b_grad_scores2, b_query2, b_grad_key2, input_precision="ieee")

        offsets = batch * stride_gb + kv_head * stride_gh + keys.to(tl.int64) * stride_gn
        store_tile(p_grad_key, offsets, keys < m, b_grad_key1 * scaling, W, BLOCK_W)
        if W < D:
            store_tile(p_grad_key + W, offsets, keys < m, b_grad_key2 * scaling, W, BLOCK_W)
        store_tile(p_grad_value, offsets, keys < m, b_grad_value, D, BLOCK_D)


def block_sizes(kernel: str, map_dim: int, head_dim: int, dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Tile sizes, warps and pipeline stages of a kernel: `"forward"`, `"query_gradient"` or `"key_value_gradient"`.

    For Hopper (227 KB of shared memory, 255 registers for a thread) and not yet measured: by arithmetic, accumulators
    of two [BLOCK_M, D] take at most 128 of a thread's registers, and tiles in flight fit shared memory. As compiled,
    inner loops of D up to 128 keep all but a few numbers in registers, wider ones spill.

    Args:
        kernel: which one.
        map_dim: width of one map's query and key.
        head_dim: D.
        dtype: of queries, keys and values.
        rows: how many rows a key/value head has; few get a smaller tile.
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
    if kernel != "key_value_gradient":
        block_m = min(block_m, few)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def split_count(m: int, programs: int, processors: int) -> int:
    """How many programs share the m keys of a row: two for each processor in all, 256 keys or more for each."""
    return max(1, min(2 * processors // programs, m // 256, 64))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, differential_lambda: torch.Tensor, map_dim: int
) -> dict[str, Any]:
    """What all kernels on rows get besides pointers: strides, n, m and widths."""
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
        "GROUP": query.shape[1] // 2 // key.shape[1],
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
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output [b, n, h, D]; and if they are to be saved, the maps' outputs [2, b, n, h, D] and sums [2, b, n, h]."""
    output, outputs, lse = _empty_outputs(query, save)
    b, n, h, d = output.shape
    kv_heads, m, rows = key.shape[1], key.shape[2], n * h // key.shape[1]
    differential_lambda = differential_lambda.contiguous()
    arguments = _arguments(query, key, value, differential_lambda, map_dim)
    blocks = block_sizes("forward", map_dim, d, query.dtype, rows)
    programs = triton.cdiv(rows, blocks["BLOCK_M"]) * kv_heads * b
    splits = 1 if save or n > DECODING_TOKENS else split_count(m, programs, _processors(query.device))
    if splits > 1:
        outputs = query.new_empty(splits, 2, b, n, h, d, dtype=torch.float32)
        lse = query.new_empty(splits, 2, b, n, h, dtype=torch.float32)
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
            combine_kernel[(b * n * h,)](
                outputs,
                lse,
                differential_lambda,
                output,
                arguments["stride_lambda"],
                splits,
                D=d,
                BLOCK_D=arguments["BLOCK_D"],
                BLOCK_S=triton.next_power_of_2(splits),
                **OPTIONS,
            )
            outputs, lse = _empty_outputs(query, save)[1:]
    return output, outputs, lse


def _empty_outputs(query: torch.Tensor, save: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, heads, n, d = query.shape
    saved = (2, b, n, heads // 2) if save else (0,)
    return (
        query.new_empty(b, n, heads // 2, d),
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
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_outputs(query, save)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys, values and λ."""
    grads = _empty_gradients(query, key, differential_lambda)
    grad_query, grad_key, grad_value, _ = grads
    b, n, h, d = grad.shape
    kv_heads, m, rows = key.shape[1], key.shape[2], n * h // key.shape[1]
    grad, differential_lambda = grad.contiguous(), differential_lambda.contiguous()
    bounds = None if bounds is None else bounds.contiguous()
    arguments = _arguments(query, key, value, differential_lambda, map_dim)
    arguments |= {"scale": scaling * LOG2_E, "scaling": scaling}
    delta = torch.empty_like(lse)
    pointers = query, key, value, differential_lambda, bounds, grad, lse, delta
    with torch.cuda.device_of(query):
        delta_kernel[(triton.cdiv(b * n * h, 16),)](
            grad, outputs, delta, b * n * h, D=d, BLOCK_D=arguments["BLOCK_D"], BLOCK_M=16, **OPTIONS
        )
        blocks = block_sizes("query_gradient", map_dim, d, query.dtype, rows)
        strides = dict(zip(("stride_gb", "stride_gh", "stride_gn"), grad_query.stride(), strict=False))
        query_gradient_kernel[triton.cdiv(rows, blocks["BLOCK_M"]), kv_heads, b](
            *pointers, grad_query, **arguments, **strides, **blocks
        )
        blocks = block_sizes("key_value_gradient", map_dim, d, query.dtype, rows)
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
    """Of queries, keys, values and λ; heads lie beside each other in memory, as a projection makes them."""
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_gradients(query, key, differential_lambda)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.map_dim, ctx.scaling = inputs[5:7]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.map_dim, ctx.scaling), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)


def triton_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    bounds: torch.Tensor | None,
    map_dim: int,
    scaling: float,
) -> torch.Tensor:
    """Differential attention, (softmax(Q1 K1ᵀ·scaling) - λ softmax(Q2 K2ᵀ·scaling)) V (arXiv 2410.05258, equation 1).

    Inputs may have any strides but for a contiguous last dimension. What lies in keys and values outside of the
    intervals of all queries has no influence, be it NaN.

    Args:
        query: [b, 2h, n, D], float16, bfloat16 or float32; the two maps of a head are neighbours.
        key: [b, h_kv, m, D] in that dtype, h_kv a divisor of h: as many heads as a key/value head has to serve follow
            each other.
        value: [b, h_kv, m, D] in that dtype.
        differential_lambda: λ in float32, [1] or [b, n, h, 1].
        bounds: [b, 1, n, 2] in int32, the half-open interval of the keys that each query sees; all queries' outputs
            and gradients are 0 where it is empty. `None`: causal, the last query sees the last key.
        map_dim: width of one map's query and key. D: they are whole (V2). D/2: the first map's are the first half, the
            second map's the second half; the other halves of queries are not read, and their gradients are 0 (V1).
        scaling: factor of the scores before the softmax, positive.

    Returns:
        [b, n, h, D] in the queries' dtype, subtracted in float32.

    Raises:
        `ImportError`: triton is not installed.
        `ValueError`: a shape, dtype or stride is another. The message names the rule and what was received.
    """
    if not HAS_TRITON:
        raise ImportError("triton_attention needs triton, which comes with CUDA builds of torch.")
    _check(query, key, value, differential_lambda, bounds, map_dim, scaling)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, differential_lambda))
    return _forward(query, key, value, differential_lambda, bounds, map_dim, scaling, save)[0]


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    bounds: torch.Tensor | None,
    map_dim: int,
    scaling: float,
) -> None:
    """Raises `ValueError` unless the inputs are as `triton_attention` says."""
    b, heads, n, d = query.shape
    kv_heads, m = key.shape[1:3]
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"Queries, keys and values must be of one dtype, float16, bfloat16 or float32, got {query.dtype}, "
            f"{key.dtype} and {value.dtype}."
        )
    if heads % 2 or heads // 2 % kv_heads or key.shape != (b, kv_heads, m, d) or value.shape != key.shape:
        raise ValueError(
            "Queries must be [b, 2h, n, D], keys and values [b, h_kv, m, D] with h divisible by h_kv, got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if not 32 <= d <= 256 or map_dim not in (d, d // 2) or d % 2:
        raise ValueError(f"D must be even, from 32 to 256, and map_dim D or D/2, got {d} and {map_dim}.")
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        raise ValueError("The last dimension of queries, keys and values must be contiguous.")
    shape = tuple(differential_lambda.shape)
    if differential_lambda.dtype != torch.float32 or shape not in ((1,), (b, n, heads // 2, 1)):
        raise ValueError(
            f"λ must be float32, [1] or [b, n, h, 1] = {[b, n, heads // 2, 1]}, got {differential_lambda.dtype}, "
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
