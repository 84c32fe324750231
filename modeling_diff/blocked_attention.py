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
from typing import Any

import torch


ROWS = 128
"""Queries of a block: enough for fast products, few enough that causal blocks end near the diagonal."""

BLOCK = 2**20
"""Numbers of a block's map, 4 MiB in float32, unless one head has more."""


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
    """A call's tensors by key/value head.

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
        pairs = query.reshape(b * key_value_heads, -1, 2, n, width)
        self.queries = pairs[:, :, 0, :, :map_dim], pairs[:, :, 1, :, width - map_dim :]  # [B, g, n, d]
        key = key.reshape(-1, m, width)
        self.keys = key[..., :map_dim], key[..., width - map_dim :]  # [B, m, d]
        self.values = value.reshape(-1, m, width)  # [B, m, D]
        self.shape = b, key_value_heads, pairs.shape[1], n, m, width
        self.differential_lambda = self.by_head(
            differential_lambda.expand(b, n, query.shape[1] // 2, 1)
        )  # [B, g, n, 1]
        self.mask, self.scaling = mask, scaling

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

    def memory(self, count: int) -> list[torch.Tensor]:
        """Room for so many maps of the largest block."""
        size = max(self.size(block) for block in self.blocks())
        return list(self.values.new_empty(count, size))

    def size(self, block: Block) -> int:
        """Numbers of a map."""
        heads, rows = block.heads.stop - block.heads.start, block.rows.stop - block.rows.start
        return heads * self.shape[2] * rows * block.seen

    def place(self, memory: torch.Tensor, block: Block) -> torch.Tensor:
        """A block's map in `memory`, [heads, g · rows, seen]."""
        return memory[: self.size(block)].view(block.heads.stop - block.heads.start, -1, block.seen)

    def rows(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """A block of a tensor [B, g, n, x], [heads, g · rows, x]."""
        return tensor[block.heads, :, block.rows].flatten(1, 2)

    def softmax_map(self, which: int, block: Block, memory: torch.Tensor) -> torch.Tensor:
        """Softmax map 0 or 1 of a block, [heads, g · rows, seen]. A query that sees no key sees all alike."""
        scores = self.place(memory, block)
        query, key = self.rows(self.queries[which], block), self.keys[which][block.heads, : block.seen]
        torch.baddbmm(scores, query, key.transpose(1, 2), beta=0, alpha=self.scaling, out=scores)
        grouped = scores.unflatten(1, (self.shape[2], -1))  # [heads, g, rows, seen]
        if self.mask is not None:
            batch = torch.arange(block.heads.start, block.heads.stop) // self.shape[1] % self.mask.shape[0]
            hidden = ~self.mask[batch, :, block.rows]
            grouped.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        else:
            rows = grouped.shape[2]
            hidden = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu(1)
            grouped[..., block.seen - rows :].masked_fill_(hidden, -torch.inf)
        return torch.softmax(scores, dim=-1, out=scores)


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
            maps, second = (views.softmax_map(which, block, memory[which]) for which in (0, 1))
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
        of_pairs = torch.zeros(
            len(views.values), groups, 2, *gradient.shape[2:], dtype=query.dtype, device=query.device
        )
        of_key, of_values = torch.zeros_like(views.values), torch.zeros_like(views.values)
        of_queries = of_pairs[:, :, 0, :, :map_dim], of_pairs[:, :, 1, :, width - map_dim :]
        of_keys = of_key[..., :map_dim], of_key[..., width - map_dim :]
        memory = views.memory(4)
        for block in views.blocks():
            seen = block.heads, slice(block.seen)
            of_output, lambdas = views.rows(gradient, block), views.rows(views.differential_lambda, block)
            maps = [views.softmax_map(which, block, memory[which]) for which in (0, 1)]
            of_maps, work = views.place(memory[2], block), views.place(memory[3], block)
            torch.bmm(of_output, views.values[seen].transpose(1, 2), out=of_maps)
            torch.addcmul(maps[0], maps[1], lambdas, value=-1, out=work)
            of_values[seen].baddbmm_(work.transpose(1, 2), of_output)
            for which in (0, 1):
                torch.mul(maps[which], of_maps, out=work)
                delta = work.sum(-1, keepdim=True)
                work.addcmul_(maps[which], delta, value=-1)
                if which == 1:
                    work.mul_(-lambdas)
                    of_lambda[block.heads, :, block.rows] = -delta.unflatten(1, (groups, -1))
                of_query = torch.bmm(work, views.keys[which][seen])
                of_queries[which][block.heads, :, block.rows] = of_query.unflatten(1, (groups, -1))
                rows = views.rows(views.queries[which], block)
                of_keys[which][seen].baddbmm_(work.transpose(1, 2), rows, alpha=scaling)
        of_lambda = views.by_token(of_lambda).sum_to_size(differential_lambda.shape)
        return of_pairs.mul_(scaling).view_as(query), of_key.view_as(key), of_values.view_as(value), of_lambda

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


def one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    differential_lambda: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """One query: keys and values are read once. Padded queries read whole keys, for one product is faster than two."""
    (b, key_value_heads, m, width), h = key.shape, query.shape[1] // 2
    query = query.reshape(b * key_value_heads, -1, width)
    scores = torch.baddbmm(query.new_empty(()), query, key.reshape(-1, m, width).transpose(1, 2), beta=0, alpha=scaling)
    if mask is not None:
        scores.unflatten(0, (b, -1)).masked_fill_(~mask, torch.finfo(scores.dtype).min)
    first, second = torch.softmax(scores, dim=-1).unflatten(1, (-1, 2)).unbind(2)  # [B, g, m]
    lambdas = differential_lambda.expand(b, 1, h, 1).reshape(*first.shape[:2], 1)
    maps = torch.addcmul(first, second, lambdas, value=-1)
    return torch.bmm(maps, value.reshape(-1, m, width)).view(b, 1, -1, width)
