# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Differential attention on CPUs, in plain PyTorch, by blocks of queries.

A block's two softmax maps are computed whole and subtracted before they are multiplied by V. A V1 head then costs what
two heads of a Transformer cost (two products of width d for the scores and one of width D with V), half of the padded
attention call. A block's maps fit into the processor's cache, and the backward pass computes them again.

Letters in shapes: b batch, n tokens, m keys, h differential heads, d width of one map's query and key, D width of
values; B is b times the key/value heads, and g the differential heads that share one of these.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention


ROWS = 128
"""Queries of a block: enough for fast products, few enough that causal blocks end near the diagonal."""

BLOCK = 2**22
"""Elements of a block's map, 16 MiB in float32, unless one head has more. With up to 16,384 keys each of two threads
has a head of its own."""

SHORT = 512
"""Below this KV length `varlen_attention` calls SDPA: waking the other threads (about 50 µs an operation) costs more
than the additional FLOPs."""


class Block(NamedTuple):
    """Some queries (`rows`) of some key/value heads, and the number of keys that these see at most."""

    heads: slice
    rows: slice
    kv_len: int


class AttentionLayout:
    """The tensors of a call, grouped by key/value head, with the two maps of a head side by side.

    The maps of V2 share keys and are one product with twice the rows; those of V1 have their own keys: two products.

    Args:
        query: [b, 2h, n, D], in V1 padded. key, value: [b, key/value heads, m, D].
        differential_lambda: λ, [1] or [b, n, h, 1].
        mask: `None`, causal with the last query at the last key, or which keys a query sees, [b or 1, 1, n, m].
        map_dim: d in V1, D in V2.
        scaling: factor of the scores.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        differential_lambda: torch.Tensor,
        mask: torch.Tensor | None,
        map_dim: int,
        scaling: float,
    ) -> None:
        (b, kv_heads, m, width), n = key.shape, query.shape[2]
        pairs = query.reshape(b * kv_heads, -1, 2, n, width).transpose(1, 2)  # [B, 2, g, n, D]
        halves = pairs[:, 0, ..., :map_dim], pairs[:, 1, ..., width - map_dim :]
        self.queries = torch.stack(halves, dim=1)  # [B, 2, g, n, d]
        self.keys = key.reshape(b * kv_heads, m, -1, map_dim).transpose(1, 2).contiguous()  # [B, 2 or 1, m, d]
        self.values = value.reshape(-1, m, width)  # [B, m, D]
        self.shape = b, kv_heads, pairs.shape[2], n, m, width
        self.differential_lambda = self.by_head(differential_lambda.expand(b, n, query.shape[1] // 2, 1))
        self.mask, self.scaling = mask, scaling
        rows = min(ROWS, n)
        self.causal_mask = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)  # true: hidden

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """[b, n, h, x] -> [B, g, n, x]."""
        return tensor.unflatten(2, (self.shape[1], -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, g, n, x] -> [b, n, h, x]."""
        return tensor.unflatten(0, (-1, self.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def blocks(self) -> Iterator[Block]:
        """All blocks of the call."""
        b, kv_heads, groups, n, m, _ = self.shape
        rows = min(ROWS, n)
        heads = max(1, BLOCK // (groups * rows * m))
        for first in range(0, b * kv_heads, heads):
            for start in range(0, n, rows):
                stop = min(start + rows, n)
                kv_len = m if self.mask is not None else stop + m - n
                yield Block(slice(first, min(first + heads, b * kv_heads)), slice(start, stop), kv_len)

    def map_size(self, block: Block) -> int:
        """Elements of one map of a block."""
        heads, rows = block.heads.stop - block.heads.start, block.rows.stop - block.rows.start
        return heads * self.shape[2] * rows * block.kv_len

    def workspace(self, maps: int) -> torch.Tensor:
        """Memory for so many maps of the largest block."""
        return self.values.new_empty(maps * max(self.map_size(block) for block in self.blocks()))

    def workspace_view(self, workspace: torch.Tensor, block: Block, maps: int = 2) -> torch.Tensor:
        """A block's maps in `workspace`, [heads, maps, g · rows, kv_len]."""
        heads = block.heads.stop - block.heads.start
        return workspace[: maps * self.map_size(block)].view(heads, maps, -1, block.kv_len)

    def rows(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """A block's rows of a tensor [B, g, n, x], [heads, g · rows, x]."""
        return tensor[block.heads, :, block.rows].flatten(1, 2)

    def score_factors(self, maps: torch.Tensor, block: Block) -> tuple[torch.Tensor, ...]:
        """A block's maps [products, rows, kv_len], and the queries [products, rows, d] and keys [products, kv_len, d]
        whose products their scores are."""
        keys = self.keys[block.heads, :, : block.kv_len].flatten(0, 1)
        queries = self.queries[block.heads, :, :, block.rows].reshape(len(keys), -1, keys.shape[-1])
        return maps.view(len(keys), -1, block.kv_len), queries, keys

    def softmax_maps(self, block: Block, workspace: torch.Tensor) -> torch.Tensor:
        """Both softmax maps of a block, [heads, 2, g · rows, kv_len]; uniform for a query that sees no key."""
        maps = self.workspace_view(workspace, block)
        scores, queries, keys = self.score_factors(maps, block)
        torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=self.scaling, out=scores)
        grouped = maps.unflatten(2, (self.shape[2], -1))  # [heads, 2, g, rows, kv_len]
        if self.mask is not None:
            batch = torch.arange(block.heads.start, block.heads.stop) // self.shape[1] % self.mask.shape[0]
            hidden = ~self.mask[batch, :, None, block.rows]
            grouped.masked_fill_(hidden, torch.finfo(maps.dtype).min)
        else:
            rows = grouped.shape[3]
            grouped[..., block.kv_len - rows :].masked_fill_(self.causal_mask[:rows, :rows], -torch.inf)
        return torch.softmax(maps, dim=-1, out=maps)


class BlockedAttention(torch.autograd.Function):
    """O = (A1 - λ·A2) V and its gradients. See `blocked_attention`."""

    @staticmethod
    def forward(*call: Any) -> torch.Tensor:
        """[b, n, h, D]. Arguments as `AttentionLayout`'s."""
        layout = AttentionLayout(*call)
        b, kv_heads, groups, n, _, width = layout.shape
        out = layout.values.new_empty(b * kv_heads, groups, n, width)
        workspace = layout.workspace(2)
        for block in layout.blocks():
            maps, second = layout.softmax_maps(block, workspace).unbind(1)
            maps.addcmul_(second, layout.rows(layout.differential_lambda, block), value=-1)
            product = torch.bmm(maps, layout.values[block.heads, : block.kv_len])
            out[block.heads, :, block.rows] = product.unflatten(1, (groups, -1))
        return layout.by_token(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keeps the inputs alone: the maps are computed again."""
        *tensors, ctx.map_dim, ctx.scaling = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query, key, value and λ."""
        return (*BlockedGradients.apply(gradient, *ctx.saved_tensors, ctx.map_dim, ctx.scaling), None, None, None)


class BlockedGradients(torch.autograd.Function):
    """The gradients of `BlockedAttention`, which are not differentiable themselves.

    With dP = dO Vᵀ of both maps: dS1 = A1∘(dP - Σ A1∘dP), dS2 = -λ·A2∘(dP - Σ A2∘dP), dλ = -Σ A2∘dP.
    """

    @staticmethod
    def forward(gradient: torch.Tensor, *call: Any) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key, value and λ, from the output's [b, n, h, D] and `AttentionLayout`'s arguments."""
        query, key, value, differential_lambda, _, map_dim, scaling = call
        layout = AttentionLayout(*call)
        groups, width = layout.shape[2], layout.shape[5]
        gradient = layout.by_head(gradient)
        dlambda = torch.empty_like(layout.differential_lambda, memory_format=torch.contiguous_format)
        dq = torch.empty_like(layout.queries)
        dk, dv = torch.zeros_like(layout.keys), torch.zeros_like(layout.values)
        map_workspace, score_workspace, dmap_workspace = (layout.workspace(maps) for maps in (2, 2, 1))
        for block in layout.blocks():
            visible = block.heads, slice(block.kv_len)
            do, lambdas = layout.rows(gradient, block), layout.rows(layout.differential_lambda, block)
            maps = layout.softmax_maps(block, map_workspace)
            dscores = layout.workspace_view(score_workspace, block)
            dmap = layout.workspace_view(dmap_workspace, block, maps=1)
            torch.bmm(do, layout.values[visible].transpose(1, 2), out=dmap.squeeze(1))
            difference = torch.addcmul(maps[:, 0], maps[:, 1], lambdas, value=-1, out=dscores[:, 0])
            dv[visible].baddbmm_(difference.transpose(1, 2), do)
            torch.mul(maps, dmap, out=dscores)
            delta = dscores.sum(-1, keepdim=True)
            dscores.addcmul_(maps, delta, value=-1)
            dscores[:, 1].mul_(-lambdas)
            dlambda[block.heads, :, block.rows] = -delta[:, 1].unflatten(1, (groups, -1))
            dscores, queries, keys = layout.score_factors(dscores, block)
            out = dq[block.heads, :, :, block.rows]
            out.copy_(torch.bmm(dscores, keys).view(out.shape))
            dk[block.heads, :, : block.kv_len].flatten(0, 1).baddbmm_(dscores.transpose(1, 2), queries, alpha=scaling)
        dpairs = query.new_zeros(len(layout.values), groups, 2, *gradient.shape[2:])
        torch.mul(dq[:, 0], scaling, out=dpairs[:, :, 0, :, :map_dim])
        torch.mul(dq[:, 1], scaling, out=dpairs[:, :, 1, :, width - map_dim :])
        dkey = dk.transpose(1, 2).reshape(key.shape)
        dlambda = layout.by_token(dlambda).sum_to_size(differential_lambda.shape)
        return dpairs.view_as(query), dkey, dv.view_as(value), dlambda

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Refuses."""
        raise NotImplementedError('Gradients of gradients need attn_implementation="eager".')


def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    mask: torch.Tensor | None,
    map_dim: int,
    scaling: float,
) -> torch.Tensor:
    """Differential attention that subtracts the two maps before it multiplies by V.

    Args:
        query: [b, 2h, n, D], in V1 padded with zeros, which are not read. key, value: [b, key/value heads, m, D].
        differential_lambda: λ, [1] or [b, n, h, 1], in the queries' dtype, float32 or float64.
        mask: `None`, causal with the last query at the last key, or which keys a query sees, [b or 1, 1, n, m].
        map_dim: d in V1, D in V2.
        scaling: factor of the scores.

    Returns:
        [b, n, h, D].
    """
    if query.shape[2] == 1 and not torch.is_grad_enabled():
        return decode(query, key, value, differential_lambda, mask, scaling)
    out: torch.Tensor = BlockedAttention.apply(query, key, value, differential_lambda, mask, map_dim, scaling)
    return out


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    map_dim: int,
    scaling: float,
) -> torch.Tensor:
    """Causal differential attention of sequences that follow one another, each by itself. Not differentiable.

    Args:
        query: [1, 2h, n, D], of all sequences. key, value: [1, key/value heads, m, D].
        differential_lambda: λ, [1] or [1, n, h, 1].
        cu_seqlens_q: 0, and where each sequence's queries end, int32. Its last query is at its last key.
        cu_seqlens_k: likewise of its keys.
        map_dim, scaling: as in `blocked_attention`.

    Returns:
        [1, n, h, D]; zeros after the last sequence.
    """
    maps_out = query.new_zeros(query.transpose(1, 2).shape)  # [1, n, 2h, D]
    long = []
    q_ranges, k_ranges = pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())
    for (q_start, q_stop), (k_start, k_stop) in zip(q_ranges, k_ranges, strict=True):
        rows, n, m = slice(q_start, q_stop), q_stop - q_start, k_stop - k_start
        sequence = query[:, :, rows], key[:, :, k_start:k_stop], value[:, :, k_start:k_stop]
        if 0 < m <= SHORT and n in (1, m):
            attended = scaled_dot_product_attention(*sequence, is_causal=n > 1, scale=scaling, enable_gqa=True)
            maps_out[:, rows] = attended.transpose(1, 2)
        elif n > 0:
            long.append((rows, sequence))
    first, second = maps_out.unflatten(-2, (-1, 2)).unbind(-2)
    out = first - differential_lambda * second
    lambdas = differential_lambda.expand(*out.shape[:3], 1)
    for rows, sequence in long:
        out[:, rows] = blocked_attention(*sequence, lambdas[:, rows], None, map_dim, scaling)
    return out


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attention of one query, [b, 2h, 1, D]: keys and values are read once.

    Padded queries read whole keys, because one product is faster than two and few columns are faster than few rows.
    """
    (b, kv_heads, m, width), h = key.shape, query.shape[1] // 2
    query = query.reshape(b * kv_heads, -1, width)
    scores = torch.bmm(key.reshape(-1, m, width), query.mul(scaling).transpose(1, 2)).transpose(1, 2).contiguous()
    if mask is not None:
        scores.unflatten(0, (b, -1)).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    first, second = torch.softmax(scores, dim=-1).unflatten(1, (-1, 2)).unbind(2)  # [B, g, m]
    lambdas = differential_lambda.expand(b, 1, h, 1).reshape(*first.shape[:2], 1)
    maps = torch.addcmul(first, second, lambdas, value=-1)
    return torch.bmm(maps, value.reshape(-1, m, width)).view(b, 1, -1, width)
