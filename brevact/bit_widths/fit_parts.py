"""Noise of layers on a part of a batch, from which `fit(quick=True)` allocates bits.

Relative noise hardly depends on the batch size: the gradient of a mean over n samples has 1 / n of the variance, from
minibatches and quantization alike. Each chain's noise is measured as usual, on the first samples of one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from brevact.bit_widths.fit_groups import Groups, with_quantizers
from brevact.bit_widths.fit_noise import FIRST_WIDTH, ChainNoise
from brevact.private_names.of_torch import tree_flatten, tree_unflatten
from brevact.reports.chains import chains_of
from brevact.reports.gradient_noise import Estimate, ExactGradients, plain_gradients
from brevact.reports.gradient_passes import Loss, as_it_was
from brevact.reports.memory import memory_of
from brevact.user_lines import warn

#: Divisors of the batch size to try, smallest part first.
_PARTS = (8, 4, 2)
#: Least samples of a part, for batch norm statistics.
_LEAST_SAMPLES = 2


def samples_of(batch: Any) -> int:
    """Return the first size that all of a batch's tensors share, or 1 if they differ.

    >>> import torch
    >>> samples_of((torch.randn(8, 3), torch.randint(5, (8,))))
    8
    >>> samples_of({"x": torch.randn(8, 3), "edges": torch.randn(2, 30)})
    1
    """
    sizes = {x.shape[0] for x in tree_flatten(batch)[0] if isinstance(x, Tensor) and x.dim()}
    return sizes.pop() if len(sizes) == 1 else 1


def part_of(batch: Any, count: int) -> Any:
    """Return the first `count` samples of a batch, in the same containers."""
    leaves, spec = tree_flatten(batch)
    return tree_unflatten([x[:count] if isinstance(x, Tensor) and x.dim() else x for x in leaves], spec)


def noise_on_part(
    model: nn.Module, groups: Groups, batch: Any, loss: Loss, exact: ExactGradients, on_pass: Callable[[], object]
) -> ChainNoise:
    """Return a ChainNoise on the smallest part of a batch that packs the same tensors.

    `groups` and `exact`, whose unit the noise has, are of whole batches; `batch` is the first one of `exact`.
    """
    samples = samples_of(batch)
    for parts in _PARTS:
        count = samples // parts
        if count < _LEAST_SAMPLES:
            continue
        part = part_of(batch, count)
        try:
            if _packed(model, groups, part, loss) < groups.costs.keys():
                continue
            with as_it_was(model):
                found = plain_gradients(model, part, loss, exact.seed)
        except Exception as error:  # of any type: the caller's code may only accept whole batches
            warn(
                f"fit(quick=True): on {count} of the {samples} samples of a batch the loss raised "
                f"{type(error).__name__}: {error}\nThe noise of layers is measured on the whole batch, which takes "
                "longer. Pass a loss that takes a part of a batch, or quick=False"
            )
            break
        on_pass()
        unit = Estimate(exact.unit.value * samples / count, math.nan)
        return ChainNoise(model, groups, [part], loss, ExactGradients([found], unit, exact.seed), on_pass)
    return ChainNoise(model, groups, [batch], loss, exact, on_pass)


def _packed(model: nn.Module, groups: Groups, batch: Any, loss: Loss) -> set[str]:
    """Return the layers that pack tensors of a batch; small tensors stay unpacked."""
    with with_quantizers(model, groups.quantizers(dict.fromkeys(groups.costs, FIRST_WIDTH))):
        report = memory_of(model, lambda measured: loss(measured, batch), batch)
    return {chain.source for chain in chains_of(report)}
