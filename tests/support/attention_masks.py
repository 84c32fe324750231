"""Attention masks for comparisons with the reference."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Inputs of a model, and the keys that each token may attend to.

    Attributes:
        attention_mask: [b, n] or `None`, as users pass it.
        position_ids: [b, n].
        visible: [b, n, n], true where query i sees key j.
        real: [b, n], false for padding.
    """

    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor
    visible: torch.Tensor
    real: torch.Tensor


def batch(kind: str, n: int) -> Batch:
    """Return two rows of `n` tokens of a kind.

    `causal` has no padding; `left` and `right` pad the two rows differently; `holes` has padding between tokens;
    `packed` has two documents per row.
    """
    causal = torch.ones(n, n, dtype=torch.bool).tril().expand(2, n, n)
    positions = torch.arange(n).expand(2, n)
    real = torch.ones(2, n, dtype=torch.bool)
    if kind == "causal":
        return Batch(None, positions, causal, real)
    if kind == "packed":
        first = n // 3 + 1
        positions = torch.cat((torch.arange(first), torch.arange(n - first))).expand(2, n)
        document = (torch.arange(n) >= first).expand(2, n)
        return Batch(None, positions, causal & (document[:, :, None] == document[:, None, :]), real)
    if kind == "holes":
        real[0, n // 2] = real[1, 1] = real[1, n - 3] = False
    else:
        padding = torch.tensor([n // 3, 1])
        distance = torch.arange(n) if kind == "left" else torch.arange(n).flip(0)
        real = distance[None] >= padding[:, None]
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    return Batch(real.long(), positions, causal & real[:, None, :] & real[:, :, None], real)


KINDS = ("causal", "left", "right", "packed")
