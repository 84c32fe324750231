"""Where V1's queries are padded."""

import torch


def padding(heads: int, width: int, signals_per_noise: int = 1) -> torch.Tensor:
    """[H, 1, D], true in the second half of signals and in the first half of their noise."""
    noise = torch.arange(heads) % (signals_per_noise + 1) == signals_per_noise
    return noise[:, None, None] == (torch.arange(width) < width // 2)
