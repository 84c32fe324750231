# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Differential attention on CPUs in plain PyTorch, in blocks of queries.

A block's softmax maps are computed whole, and a noise's map is subtracted from its signals' before they are multiplied
by V: r + 1 products for the scores of r signals and their noise, and r with V. At r = 1 a V1 head then costs what two
heads of a Transformer cost (two products of width d and one of width D), half of the padded attention call. A block's
maps fit into the processor's cache, and the backward pass computes them again.

Letters in shapes: b batch, n tokens, m keys, s signal heads, H queries of signals and noise, d width of one map's query
and key, D width of values; r signals and their noise are a group; B is b times the key/value heads, and g the groups
that share one of these.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention


ROWS = 128
"""Queries of a block: enough for fast products, few enough that causal blocks end near the diagonal."""

BLOCK = 2**23
"""Elements of a block's maps, 32 MiB in float32, unless one head has more. At r = 1, with up to 16,384 keys, each of
two threads has a head of its own."""

SHORT = 512
"""Below this KV length `varlen_attention` calls SDPA: waking the other threads (about 50 µs an operation) costs more
than the additional FLOPs."""


class Block(NamedTuple):
    """Queries (`rows`) of some key/value heads, and the maximum number of keys that they see."""

    heads: slice
    rows: slice
    kv_len: int


class AttentionLayout:
    """The tensors of a call, grouped by key/value head, with the maps of a group side by side.

    The maps of V2 share keys and are one product with r + 1 times the rows; in V1 each map is a product of its own,
    with the signals' keys or the noise's.

    Args:
        query: [b, H, n, D], in V1 padded. key, value: [b, key/value heads, m, D].
        differential_lambda: λ, [1] or [b, n, s, 1].
        mask: `None`, causal with the last query at the last key, or which keys a query sees, [b or 1, 1, n, m].
        map_dim: d in V1, D in V2.
        scaling: factor of the scores.
        signals_per_noise: r.
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
        signals_per_noise: int,
    ) -> None:
        (b, kv_heads, m, width), n, r = key.shape, query.shape[2], signals_per_noise
        maps = query.reshape(b * kv_heads, -1, r + 1, n, width).transpose(1, 2)  # [B, r + 1, g, n, D]
        halves = maps[:, :r, ..., :map_dim], maps[:, r:, ..., width - map_dim :]
        self.queries = torch.cat(halves, dim=1)  # [B, r + 1, g, n, d]
        keys = key.reshape(b * kv_heads, m, -1, map_dim).transpose(1, 2)  # [B, 2 or 1, m, d]
        if keys.shape[1] == 2:
            keys = torch.cat((keys[:, :1].expand(-1, r, -1, -1), keys[:, 1:]), dim=1)  # [B, r + 1, m, d]
        self.keys = keys.contiguous()
        self.values = value.reshape(-1, m, width)  # [B, m, D]
        self.shape, self.signals_per_noise = (b, kv_heads, maps.shape[2], n, m, width), r
        self.differential_lambda = self.by_head(differential_lambda.expand(b, n, query.shape[1] // (r + 1) * r, 1))
        self.mask, self.scaling = mask, scaling
        rows = min(ROWS, n)
        self.causal_mask = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)  # true where hidden

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """Group by key/value head: [b, n, s, x] -> [B, r, g, n, x]."""
        grouped = tensor.unflatten(2, (self.shape[1], -1, self.signals_per_noise))
        return grouped.permute(0, 2, 4, 3, 1, 5).flatten(0, 1)

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:
        """Invert `by_head`: [B, r, g, n, x] -> [b, n, s, x]."""
        return tensor.unflatten(0, (-1, self.shape[1])).permute(0, 4, 1, 3, 2, 5).flatten(2, 4)

    def blocks(self) -> Iterator[Block]:
        """Return all blocks of the call."""
        b, kv_heads, groups, n, m, _ = self.shape
        rows = min(ROWS, n)
        heads = max(1, BLOCK // ((self.signals_per_noise + 1) * groups * rows * m))
        for first in range(0, b * kv_heads, heads):
            for start in range(0, n, rows):
                stop = min(start + rows, n)
                kv_len = m if self.mask is not None else stop + m - n
                yield Block(slice(first, min(first + heads, b * kv_heads)), slice(start, stop), kv_len)

    def map_size(self, block: Block) -> int:
        """Return the number of elements of one map of a block."""
        heads, rows = block.heads.stop - block.heads.start, block.rows.stop - block.rows.start
        return heads * self.shape[2] * rows * block.kv_len

    def workspace(self, maps: int) -> torch.Tensor:
        """Allocate memory for that many maps of the largest block."""
        return self.values.new_empty(maps * max(self.map_size(block) for block in self.blocks()))

    def workspace_view(self, workspace: torch.Tensor, block: Block, maps: int) -> torch.Tensor:
        """Return a block's maps in `workspace`, [heads, maps, g · rows, kv_len]."""
        heads = block.heads.stop - block.heads.start
        return workspace[: maps * self.map_size(block)].view(heads, maps, -1, block.kv_len)

    def rows(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """Return a block's rows of a tensor [B, r, g, n, x], [heads, r, g · rows, x]."""
        return tensor[block.heads, :, :, block.rows].flatten(2, 3)

    def score_factors(self, maps: torch.Tensor, block: Block) -> tuple[torch.Tensor, ...]:
        """Return a block's maps [products, rows, kv_len], and the factors of their scores: queries
        [products, rows, d] and keys [products, kv_len, d]."""
        keys = self.keys[block.heads, :, : block.kv_len].flatten(0, 1)
        queries = self.queries[block.heads, :, :, block.rows].reshape(len(keys), -1, keys.shape[-1])
        return maps.view(len(keys), -1, block.kv_len), queries, keys

    def softmax_maps(self, block: Block, workspace: torch.Tensor) -> torch.Tensor:
        """Compute a block's softmax maps, [heads, r + 1, g · rows, kv_len]; uniform for a query that sees no key."""
        maps = self.workspace_view(workspace, block, self.signals_per_noise + 1)
        scores, queries, keys = self.score_factors(maps, block)
        torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=self.scaling, out=scores)
        grouped = maps.unflatten(2, (self.shape[2], -1))  # [heads, r + 1, g, rows, kv_len]
        if self.mask is not None:
            batch = torch.arange(block.heads.start, block.heads.stop) // self.shape[1] % self.mask.shape[0]
            hidden = ~self.mask[batch, :, None, block.rows]
            grouped.masked_fill_(hidden, torch.finfo(maps.dtype).min)
        else:
            rows = grouped.shape[3]
            grouped[..., block.kv_len - rows :].masked_fill_(self.causal_mask[:rows, :rows], -torch.inf)
        return torch.softmax(maps, dim=-1, out=maps)


class BlockedAttention(torch.autograd.Function):
    """O = (A - λ·A_noise) V of each signal head and its gradients. See `blocked_attention`."""

    @staticmethod
    def forward(*call: Any) -> torch.Tensor:
        """Compute the output [b, n, s, D]. Arguments as `AttentionLayout`'s."""
        layout = AttentionLayout(*call)
        (b, kv_heads, groups, n, _, width), r = layout.shape, layout.signals_per_noise
        out = layout.values.new_empty(b * kv_heads, r, groups, n, width)
        workspace = layout.workspace(r + 1)
        for block in layout.blocks():
            signals, noise = layout.softmax_maps(block, workspace).split((r, 1), dim=1)
            signals.addcmul_(noise, layout.rows(layout.differential_lambda, block), value=-1)
            product = torch.bmm(signals.flatten(1, 2), layout.values[block.heads, : block.kv_len])
            out[block.heads, :, :, block.rows] = product.unflatten(1, (r, groups, -1))
        return layout.by_token(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Save only the inputs. The backward computes the maps again."""
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of query, key, value and λ."""
        return (*BlockedGradients.apply(gradient, *ctx.saved_tensors, *ctx.options), None, None, None, None)


class BlockedGradients(torch.autograd.Function):
    """The gradients of `BlockedAttention`. They are not differentiable.

    With dP = dO Vᵀ of a signal: dS = A∘(dP - Σ A∘dP), dλ = -Σ A_noise∘dP, and the signal's part of dS_noise, a sum over
    the signals of a group: -λ·A_noise∘(dP - Σ A_noise∘dP).
    """

    @staticmethod
    def forward(gradient: torch.Tensor, *call: Any) -> tuple[torch.Tensor, ...]:
        """Compute gradients of query, key, value and λ from the output's [b, n, s, D] and the forward's arguments."""
        query, key, value, differential_lambda, _, map_dim, scaling, r = call
        layout = AttentionLayout(*call)
        groups, width = layout.shape[2], layout.shape[5]
        gradient = layout.by_head(gradient)
        dlambda = torch.empty_like(layout.differential_lambda, memory_format=torch.contiguous_format)
        dq = torch.empty_like(layout.queries)
        dk, dv = torch.zeros_like(layout.keys), torch.zeros_like(layout.values)
        map_workspace, score_workspace, dmap_workspace = (layout.workspace(maps) for maps in (r + 1, r + 1, r))
        for block in layout.blocks():
            visible = block.heads, slice(block.kv_len)
            do, lambdas = layout.rows(gradient, block).flatten(1, 2), layout.rows(layout.differential_lambda, block)
            maps = layout.softmax_maps(block, map_workspace)
            dscores = layout.workspace_view(score_workspace, block, r + 1)
            dmap = layout.workspace_view(dmap_workspace, block, r)
            (signals, noise), (dsignals, dnoise) = (each.split((r, 1), dim=1) for each in (maps, dscores))
            torch.bmm(do, layout.values[visible].transpose(1, 2), out=dmap.flatten(1, 2))
            difference = torch.addcmul(signals, noise, lambdas, value=-1, out=dsignals)
            dv[visible].baddbmm_(difference.flatten(1, 2).transpose(1, 2), do)
            torch.mul(signals, dmap, out=dsignals)
            dsignals.addcmul_(signals, dsignals.sum(-1, keepdim=True), value=-1)
            dmap.mul_(noise)
            delta = dmap.sum(-1, keepdim=True)
            dlambda[block.heads, :, :, block.rows] = -delta.unflatten(2, (groups, -1))
            dmap.addcmul_(noise, delta, value=-1)
            torch.mul(dmap[:, :1], -lambdas[:, :1], out=dnoise)
            for signal in range(1, r):
                dnoise.addcmul_(dmap[:, signal : signal + 1], lambdas[:, signal : signal + 1], value=-1)
            dscores, queries, keys = layout.score_factors(dscores, block)
            out = dq[block.heads, :, :, block.rows]
            out.copy_(torch.bmm(dscores, keys).view(out.shape))
            dk[block.heads, :, : block.kv_len].flatten(0, 1).baddbmm_(dscores.transpose(1, 2), queries, alpha=scaling)
        dmaps = query.new_zeros(len(layout.values), groups, r + 1, *gradient.shape[3:])
        torch.mul(dq[:, :r].transpose(1, 2), scaling, out=dmaps[:, :, :r, :, :map_dim])
        torch.mul(dq[:, r:].transpose(1, 2), scaling, out=dmaps[:, :, r:, :, width - map_dim :])
        if map_dim < width:
            dk = torch.cat((dk[:, :r].sum(1, keepdim=True), dk[:, r:]), dim=1)
        dkey = dk.transpose(1, 2).reshape(key.shape)
        dlambda = layout.by_token(dlambda).sum_to_size(differential_lambda.shape)
        return dmaps.view_as(query), dkey, dv.view_as(value), dlambda

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Raise `NotImplementedError`."""
        raise NotImplementedError('Second-order gradients are not supported. Use attn_implementation="eager".')


def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    mask: torch.Tensor | None,
    map_dim: int,
    scaling: float,
    signals_per_noise: int,
) -> torch.Tensor:
    """Compute differential attention, subtracting the noise map from the signal maps before multiplying by V.

    Args:
        query: [b, H, n, D], in V1 padded with zeros, which are not read. key, value: [b, key/value heads, m, D].
        differential_lambda: λ, [1] or [b, n, s, 1], in the queries' dtype, float32 or float64.
        mask: `None`, causal with the last query at the last key, or which keys a query sees, [b or 1, 1, n, m].
        map_dim: d in V1, D in V2.
        scaling: factor of the scores.
        signals_per_noise: r, the number of signals of a group.

    Returns:
        [b, n, s, D].
    """
    if query.shape[2] == 1 and not torch.is_grad_enabled():
        return decode(query, key, value, differential_lambda, mask, scaling, signals_per_noise)
    options = mask, map_dim, scaling, signals_per_noise
    out: torch.Tensor = BlockedAttention.apply(query, key, value, differential_lambda, *options)
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
    signals_per_noise: int,
) -> torch.Tensor:
    """Compute causal differential attention of packed sequences, each separately. Not differentiable.

    Args:
        query: [1, H, n, D], of all sequences. key, value: [1, key/value heads, m, D].
        differential_lambda: λ, [1] or [1, n, s, 1].
        cu_seqlens_q: 0 and the end of each sequence's queries, int32. The last query is at the last key.
        cu_seqlens_k: 0 and the end of each sequence's keys, int32.
        map_dim, scaling, signals_per_noise: as in `blocked_attention`.

    Returns:
        [1, n, s, D]; zeros after the last sequence.
    """
    maps_out = query.new_zeros(query.transpose(1, 2).shape)  # [1, n, H, D]
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
    out = combine_outputs(maps_out, differential_lambda, signals_per_noise)
    lambdas = differential_lambda.expand(*out.shape[:3], 1)
    for rows, sequence in long:
        out[:, rows] = blocked_attention(*sequence, lambdas[:, rows], None, map_dim, scaling, signals_per_noise)
    return out


def combine_outputs(outputs: torch.Tensor, differential_lambda: torch.Tensor, signals_per_noise: int) -> torch.Tensor:
    """Subtract λ times the noise's output from each signal's: [b, n, H, D], λ [1] or [b, n, s, 1] -> [b, n, s, D]."""
    signals, noise = outputs.unflatten(2, (-1, signals_per_noise + 1)).split((signals_per_noise, 1), dim=3)
    if differential_lambda.dim() > 1:
        differential_lambda = differential_lambda.unflatten(2, (-1, signals_per_noise))
    return (signals - differential_lambda * noise).flatten(2, 3)


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    signals_per_noise: int,
) -> torch.Tensor:
    """Compute attention of one query, [b, H, 1, D], reading keys and values once.

    Padded queries multiply whole keys: one product is faster than two, and few columns are faster than few rows.
    """
    (b, kv_heads, m, width), r = key.shape, signals_per_noise
    query = query.reshape(b * kv_heads, -1, width)
    scores = torch.bmm(key.reshape(-1, m, width), query.mul(scaling).transpose(1, 2)).transpose(1, 2).contiguous()
    if mask is not None:
        scores.unflatten(0, (b, -1)).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    signals, noise = torch.softmax(scores, dim=-1).unflatten(1, (-1, r + 1)).split((r, 1), dim=2)  # [B, g, r or 1, m]
    lambdas = differential_lambda.expand(b, 1, signals[..., 0].numel() // b, 1).reshape(*signals.shape[:3], 1)
    maps = torch.addcmul(signals, noise, lambdas, value=-1).flatten(1, 2)
    return torch.bmm(maps, value.reshape(-1, m, width)).view(b, 1, -1, width)
