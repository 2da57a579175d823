"""Learning rates over the steps of a run. Imports nothing of brevact."""

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    """A linear warm-up over a twentieth of the steps, then a cosine to zero."""
    return LambdaLR(optimizer, partial(warmup_factor, warmup=steps // 20, total=steps, decay=True))


def warmup_factor(step: int, *, warmup: int, total: int, decay: bool) -> float:
    """Factor of the learning rate: linear warm-up, then constant or a cosine to zero.

    f(t) = (t + 1) / (warmup + 1) for t < warmup, then (1 + cos(pi (t - warmup) / (total - warmup))) / 2 or 1.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if not decay:
        return 1.0
    return (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup)))) / 2.0
