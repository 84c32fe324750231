# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Differential attention in plain PyTorch, by blocks of queries, for CPUs.

Both maps of a block are made whole, so that they are subtracted before they meet the values. A head of V1 then costs
what two heads of a Transformer do, two products of width d for the scores and one of width D with the values, and half
of what the padded call costs. A block's maps fit into a processor's cache, and backward makes them again.

Letters in shapes: b batch, n tokens, m keys, h differential heads, d width of one map's query and key, D width of
values; B is b times the key/value heads and g how many differential heads share one of these.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .differential_attention import combine_maps


ROWS = 128
"""Queries of a block: enough for fast products, few enough that causal blocks end near the diagonal."""

BLOCK = 2**22
"""Numbers of a block's map, 16 MiB in float32, unless one head has more: up to 16,384 keys each thread has a head."""

SHORT = 512
"""Keys of a sequence up to which `packed_attention` needs fewest operations, rather than least work: within a server's
thread each operation takes as long to wake the other threads as so many keys take."""


class Block:
    """Some queries of some key/value heads.

    Args:
        heads: which key/value heads.
        rows: which queries.
        seen: how many keys these see at most.
    """

    def __init__(self, heads: slice, rows: slice, seen: int) -> None:
        self.heads, self.rows, self.seen = heads, rows, seen


class Views:
    """A call's tensors by key/value head, and both maps' side by side.

    Maps that share keys are one product with twice the rows, those of V1, whose keys differ, two products.

    Args:
        query: [b, 2h, n, D], in V1 padded. key, value: [b, key/value heads, m, D].
        differential_lambda: λ, [1] or [b, n, h, 1].
        mask: `None`, causal with the last query at the last key, or which keys a query sees, [b or 1, 1, n, m].
        map_dim: d in V1, D in V2.
        scaling: of the scores.
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
        (b, key_value_heads, m, width), n = key.shape, query.shape[2]
        pairs = query.reshape(b * key_value_heads, -1, 2, n, width).transpose(1, 2)  # [B, 2, g, n, D]
        halves = pairs[:, 0, ..., :map_dim], pairs[:, 1, ..., width - map_dim :]
        self.queries = torch.stack(halves, dim=1)  # [B, 2, g, n, d]
        self.keys = key.reshape(b * key_value_heads, m, -1, map_dim).transpose(1, 2).contiguous()  # [B, 2 or 1, m, d]
        self.values = value.reshape(-1, m, width)  # [B, m, D]
        self.shape = b, key_value_heads, pairs.shape[2], n, m, width
        self.differential_lambda = self.by_head(
            differential_lambda.expand(b, n, query.shape[1] // 2, 1)
        )  # [B, g, n, 1]
        self.mask, self.scaling = mask, scaling
        rows = min(ROWS, n)
        self.later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)  # within a block

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """[b, n, h, x] -> [B, g, n, x]."""
        return tensor.unflatten(2, (self.shape[1], -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, g, n, x] -> [b, n, h, x]."""
        return tensor.unflatten(0, (-1, self.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def blocks(self) -> Iterator[Block]:
        """All of them."""
        b, key_value_heads, groups, n, m, _ = self.shape
        rows = min(ROWS, n)
        heads = max(1, BLOCK // (groups * rows * m))
        for first in range(0, b * key_value_heads, heads):
            for start in range(0, n, rows):
                stop = min(start + rows, n)
                seen = m if self.mask is not None else stop + m - n
                yield Block(slice(first, min(first + heads, b * key_value_heads)), slice(start, stop), seen)

    def memory(self, maps: int) -> torch.Tensor:
        """Room for so many maps of the largest block."""
        return self.values.new_empty(maps * max(self.size(block) for block in self.blocks()))

    def size(self, block: Block) -> int:
        """Numbers of a map."""
        heads, rows = block.heads.stop - block.heads.start, block.rows.stop - block.rows.start
        return heads * self.shape[2] * rows * block.seen

    def place(self, memory: torch.Tensor, block: Block, maps: int = 2) -> torch.Tensor:
        """A block's maps in `memory`, [heads, maps, g · rows, seen]."""
        heads = block.heads.stop - block.heads.start
        return memory[: maps * self.size(block)].view(heads, maps, -1, block.seen)

    def rows(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """A block of a tensor [B, g, n, x], [heads, g · rows, x]."""
        return tensor[block.heads, :, block.rows].flatten(1, 2)

    def factors(self, maps: torch.Tensor, block: Block) -> tuple[torch.Tensor, ...]:
        """What the products of queries and keys are made of: a block's maps [products, rows, seen], its queries
        [products, rows, d], and the keys that it sees, [products, seen, d]."""
        keys = self.keys[block.heads, :, : block.seen].flatten(0, 1)
        queries = self.queries[block.heads, :, :, block.rows].reshape(len(keys), -1, keys.shape[-1])
        return maps.view(len(keys), -1, block.seen), queries, keys

    def softmax_maps(self, block: Block, memory: torch.Tensor) -> torch.Tensor:
        """Both softmax maps of a block, [heads, 2, g · rows, seen]. A query that sees no key sees all alike."""
        maps = self.place(memory, block)
        scores, queries, keys = self.factors(maps, block)
        torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=self.scaling, out=scores)
        grouped = maps.unflatten(2, (self.shape[2], -1))  # [heads, 2, g, rows, seen]
        if self.mask is not None:
            batch = torch.arange(block.heads.start, block.heads.stop) // self.shape[1] % self.mask.shape[0]
            hidden = ~self.mask[batch, :, None, block.rows]
            grouped.masked_fill_(hidden, torch.finfo(maps.dtype).min)
        else:
            rows = grouped.shape[3]
            grouped[..., block.seen - rows :].masked_fill_(self.later[:rows, :rows], -torch.inf)
        return torch.softmax(maps, dim=-1, out=maps)


class BlockedAttention(torch.autograd.Function):
    """O = (A1 - λ·A2) V and its gradients. See `blocked_attention`."""

    @staticmethod
    def forward(*call: Any) -> torch.Tensor:
        """[b, n, h, D], of what `Views` takes."""
        views = Views(*call)
        b, key_value_heads, groups, n, _, width = views.shape
        output = views.values.new_empty(b * key_value_heads, groups, n, width)
        memory = views.memory(2)
        for block in views.blocks():
            maps, second = views.softmax_maps(block, memory).unbind(1)
            maps.addcmul_(second, views.rows(views.differential_lambda, block), value=-1)
            product = torch.bmm(maps, views.values[block.heads, : block.seen])
            output[block.heads, :, block.rows] = product.unflatten(1, (groups, -1))
        return views.by_token(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """What backward needs."""
        *tensors, ctx.map_dim, ctx.scaling = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query, key, value and λ."""
        return (*BlockedGradients.apply(gradient, *ctx.saved_tensors, ctx.map_dim, ctx.scaling), None, None, None)


class BlockedGradients(torch.autograd.Function):
    """The gradients of `BlockedAttention`, which have none themselves.

    With dP = dO Vᵀ of both maps: dS1 = A1∘(dP - Σ A1∘dP), dS2 = -λ·A2∘(dP - Σ A2∘dP), dλ = -Σ A2∘dP.
    """

    @staticmethod
    def forward(gradient: torch.Tensor, *call: Any) -> tuple[torch.Tensor, ...]:
        """Of query, key, value and λ, from that of the output [b, n, h, D] and what `Views` takes."""
        query, key, value, differential_lambda, _, map_dim, scaling = call
        views = Views(*call)
        groups, width = views.shape[2], views.shape[5]
        gradient = views.by_head(gradient)
        of_lambda = torch.empty_like(views.differential_lambda, memory_format=torch.contiguous_format)
        of_queries = torch.empty_like(views.queries)
        of_keys, of_values = torch.zeros_like(views.keys), torch.zeros_like(views.values)
        first, second, third = views.memory(2), views.memory(2), views.memory(1)
        for block in views.blocks():
            seen = block.heads, slice(block.seen)
            of_output, lambdas = views.rows(gradient, block), views.rows(views.differential_lambda, block)
            maps = views.softmax_maps(block, first)
            work, of_maps = views.place(second, block), views.place(third, block, maps=1)
            torch.bmm(of_output, views.values[seen].transpose(1, 2), out=of_maps.squeeze(1))
            torch.addcmul(maps[:, 0], maps[:, 1], lambdas, value=-1, out=work[:, 0])
            of_values[seen].baddbmm_(work[:, 0].transpose(1, 2), of_output)
            torch.mul(maps, of_maps, out=work)
            delta = work.sum(-1, keepdim=True)
            work.addcmul_(maps, delta, value=-1)
            work[:, 1].mul_(-lambdas)
            of_lambda[block.heads, :, block.rows] = -delta[:, 1].unflatten(1, (groups, -1))
            of_scores, queries, keys = views.factors(work, block)
            into = of_queries[block.heads, :, :, block.rows]
            into.copy_(torch.bmm(of_scores, keys).view(into.shape))
            of_keys[block.heads, :, : block.seen].flatten(0, 1).baddbmm_(
                of_scores.transpose(1, 2), queries, alpha=scaling
            )
        of_pairs = torch.zeros(
            len(views.values), groups, 2, *gradient.shape[2:], dtype=query.dtype, device=query.device
        )
        torch.mul(of_queries[:, 0], scaling, out=of_pairs[:, :, 0, :, :map_dim])
        torch.mul(of_queries[:, 1], scaling, out=of_pairs[:, :, 1, :, width - map_dim :])
        of_key = of_keys.transpose(1, 2).reshape(key.shape)
        of_lambda = views.by_token(of_lambda).sum_to_size(differential_lambda.shape)
        return of_pairs.view_as(query), of_key, of_values.view_as(value), of_lambda

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Nothing is kept."""

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
    """Differential attention with both maps subtracted before the values.

    Args:
        query: [b, 2h, n, D], in V1 padded with zeros, which are not read. key, value: [b, key/value heads, m, D].
        differential_lambda: λ, [1] or [b, n, h, 1], in the queries' dtype, float32 or float64.
        mask: `None`, causal with the last query at the last key, or which keys a query sees, [b or 1, 1, n, m].
        map_dim: d in V1, D in V2.
        scaling: of the scores.

    Returns:
        [b, n, h, D].
    """
    if query.shape[2] == 1 and not torch.is_grad_enabled():
        return one_query(query, key, value, differential_lambda, mask, scaling)
    output: torch.Tensor = BlockedAttention.apply(query, key, value, differential_lambda, mask, map_dim, scaling)
    return output


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    map_dim: int,
    scaling: float,
) -> torch.Tensor:
    """Differential attention of sequences that follow one another, each by itself. Not for gradients.

    Of short sequences PyTorch computes both maps' outputs, each in one call, and these are subtracted.

    Args:
        query: [1, 2h, n, D], of all sequences. key, value: [1, key/value heads, m, D].
        differential_lambda: λ, [1] or [1, n, h, 1].
        query_ends: 0, and where each sequence's queries end, int32. The last of them is that of its last key.
        key_ends: likewise of its keys.
        map_dim, scaling: as in `blocked_attention`.

    Returns:
        [1, n, h, D]; zeros behind the last sequence.
    """
    both = query.new_zeros(query.transpose(1, 2).shape)  # [1, n, 2h, D]
    long = []
    for (start, stop), (first, last) in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        rows, seen, n, m = slice(start, stop), slice(first, last), stop - start, last - first
        sequence = query[:, :, rows], key[:, :, seen], value[:, :, seen]
        if 0 < m <= SHORT and n in (1, m):
            outputs = scaled_dot_product_attention(*sequence, is_causal=n > 1, scale=scaling, enable_gqa=True)
            both[:, rows] = outputs.transpose(1, 2)
        elif n > 0:
            long.append((rows, sequence))
    output = combine_maps(both, differential_lambda)
    lambdas = differential_lambda.expand(*output.shape[:3], 1)
    for rows, sequence in long:
        output[:, rows] = blocked_attention(*sequence, lambdas[:, rows], None, map_dim, scaling)
    return output


def one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """One query: keys and values are read once. Padded queries read whole keys, for one product is faster than two, and
    a product of few columns faster than one of few rows."""
    (b, key_value_heads, m, width), h = key.shape, query.shape[1] // 2
    query = query.reshape(b * key_value_heads, -1, width)
    scores = torch.bmm(key.reshape(-1, m, width), query.mul(scaling).transpose(1, 2)).transpose(1, 2).contiguous()
    if mask is not None:
        scores.unflatten(0, (b, -1)).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    first, second = torch.softmax(scores, dim=-1).unflatten(1, (-1, 2)).unbind(2)  # [B, g, m]
    lambdas = differential_lambda.expand(b, 1, h, 1).reshape(*first.shape[:2], 1)
    maps = torch.addcmul(first, second, lambdas, value=-1)
    return torch.bmm(maps, value.reshape(-1, m, width)).view(b, 1, -1, width)
