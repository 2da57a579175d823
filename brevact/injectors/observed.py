"""A tensor with its scale: what quantizes it, in the forward pass or when backward starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from brevact.injectors.scaled_codes import ScaledCodes, grouped
from brevact.injectors.tensor_statistics import TensorStatistics
from brevact.quantizers import Layout, PackedActivation
from brevact.quantizers.philox import seed_value


@dataclass(frozen=True, eq=False)
class ObservedQuantizer:
    """Quantizes one tensor with the scale and the zero point that were taken of it.

    Args:
        name: of the injector.
        statistics: took them.
        scale: Brevitas' scale.
        zero_point: Brevitas' zero point; None for zero.
    """

    name: str
    statistics: TensorStatistics
    scale: Tensor
    zero_point: Tensor | None

    @property
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed."""
        return bool(self.statistics.roundings)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack the tensor.

        Args:
            x: the tensor that was observed, in whatever memory order.
            seed: key of the random bits of stochastic rounding.

        Returns:
            The packed activation.
        """
        form, zero_point = self.statistics.format, self.zero_point
        with as_it_is(x.device), _seeded(self.statistics.roundings, seed, x.device):
            if self.scale.numel() > 1 and 0 in x.stride():  # repeats of an element may get different codes
                x = x.contiguous()
            values = form.values(x if x.dim() else x.reshape(1), self.scale, zero_point)
            expected = grouped(x, form.group)
            if values.shape != expected.shape:
                raise ValueError(
                    f"a scale of shape {tuple(self.scale.shape)} of {self.name} does not fit an activation of shape "
                    f"{tuple(x.shape)}; per_channel_broadcastable_shape= and group_dim= must"
                )
            if x.dtype == torch.float16:  # in which Brevitas' lower bound of scales is zero
                values = values.masked_fill(self.scale == 0, 0)
            scale = _flagged(self.scale, expected)
            kind, zero_kind = form.stored(scale, zero_point)
            decoder = ScaledCodes(
                codes=form.codes, dtype=values.dtype, scale=kind, zero_point=zero_kind, group=form.group
            )
            return decoder.pack(values, scale, zero_point, Layout.of(x))


@contextmanager
def as_it_is(device: torch.device) -> Iterator[None]:
    """Compute without gradients, and in the types at hand, whatever autocast does around."""
    with torch.no_grad():
        if torch.amp.is_autocast_available(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


@contextmanager
def _seeded(roundings: tuple[nn.Module, ...], seed: int | Tensor | None, device: torch.device) -> Iterator[None]:
    key = seed_value(seed, device) if roundings else None
    for rounding in roundings:
        rounding.seed = key
    try:
        yield
    finally:
        for rounding in roundings:
            rounding.seed = None


def _flagged(scale: Tensor, x: Tensor) -> Tensor:
    """Scales with NaN where what they scale holds NaN or an infinity; no waiting for the device.

    Args:
        scale: of a shape that broadcasts against that of ``x``.
        x: grouped activation.
    """
    lead = x.dim() - scale.dim()
    dims = [dim for dim in range(x.dim()) if dim < lead or scale.shape[dim - lead] == 1]
    low, high = (x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)) if dims or not x.dim() else (x, x)
    finite = (low.isfinite() & high.isfinite()).reshape(scale.shape)
    return scale.masked_fill(~finite, torch.nan)
