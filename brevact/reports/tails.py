"""Channels of a layer's input that are many times as large as the others: massive activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from brevact.injectors.proxies import names_of
from brevact.private_names.of_torch import DisableTorchFunction

#: Least ratio of a heavy tail.
HEAVY = 30.0


def tail_of(x: Tensor) -> float:
    """Return the largest root mean square of a channel, the last dimension, over the median one; 1 for zeros.

    >>> x = torch.ones(8, 64)
    >>> x[:, 3] = 50
    >>> tail_of(x)
    50.0
    """
    squares = x.detach().double().flatten(0, -2).square().mean(0)
    median = squares.median()
    return float((squares.max() / median).sqrt()) if median > 0 else 1.0


@contextmanager
def tails_of_inputs(model: nn.Module) -> Iterator[dict[str, float]]:
    """Yield a dictionary that gets the tail of each module's first input, if that is of floats, with channels last."""
    names, found = names_of(model), dict[str, float]()

    def enter(module: nn.Module, args: Any) -> None:
        x = args[0] if args and module in names else None
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or x.is_meta:
            return
        if x.is_floating_point() and x.dim() in (2, 3) and x.numel():
            with DisableTorchFunction(), torch.no_grad():
                found[names[module]] = max(tail_of(x), found.get(names[module], 0.0))

    handle = register_module_forward_pre_hook(enter)
    try:
        yield found
    finally:
        handle.remove()


def note_on(noise_and_tails: Mapping[str, tuple[float, float]]) -> str:
    """Return a sentence on the layers whose tails are heavy, with the rule that cures the noisiest; "" for none.

    Noise is NaN where it was not measured.
    """
    heavy = {layer: each for layer, each in noise_and_tails.items() if each[1] >= HEAVY}
    if not heavy:
        return ""
    worst = max(heavy, key=lambda layer: (not math.isnan(heavy[layer][0]), heavy[layer]))
    names = ", ".join(layer or "(model)" for layer in heavy)
    return (
        f"Heavy tails: channels of the inputs of {names} are up to {max(tail for _, tail in heavy.values()):.0f} times "
        f"the median one. Where that is noise, 6 bits cure it: "
        f"brevact.DEFAULT.let({{{worst!r}: brevact.DitherBackward6bit}})"
    )
