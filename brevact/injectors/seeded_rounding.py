"""Stochastic rounding inside a Brevitas quantizer, with random numbers from a region's seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from brevact.quantizers.philox import ROUNDS, philox4x32, seed_value

_LOW_32 = 0xFFFFFFFF
_ROUNDING_WORD = 2  # third word of the Philox counters; brevact.quantizers uses 0 and 1


class SeededStochasticRound(nn.Module):
    """Rounds up with the probability of the remainder, by random numbers from the seed; without a seed, to nearest.

    Brevitas' ``StochasticRoundSte`` has its own generator; here ``torch.manual_seed`` fixes every code on every device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seed: int | Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Round ``x`` to integers of its own type."""
        if self.seed is None:
            return x.round()
        below = x.floor()
        up = _uniform(x.numel(), self.seed, x.device).view(x.shape) < (x - below).float()
        return below + up.to(x.dtype)


def _uniform(numel: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """Random float32 numbers in [0, 1), multiples of 2^-24."""
    key = torch.as_tensor(seed_value(seed, device), dtype=torch.int64, device=device)
    index = torch.arange(-(-numel // 4), device=device)
    zero = torch.zeros_like(index)
    words = torch.cat(philox4x32((index & _LOW_32, index >> 32, zero + _ROUNDING_WORD, zero), key, ROUNDS))
    return (words[:numel] >> 8).float() * 2.0**-24
