"""Mask of the padding in V1's queries."""

import torch


def padding(heads: int, width: int, signals_per_noise: int = 1) -> torch.Tensor:
    """Return [H, 1, D], true in the second half of signal queries and in the first half of noise queries."""
    noise = torch.arange(heads) % (signals_per_noise + 1) == signals_per_noise
    return noise[:, None, None] == (torch.arange(width) < width // 2)
