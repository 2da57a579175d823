"""A tensor with its scale, to be quantized in the forward pass or when backward starts."""

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
    """Quantizes one tensor with the scale and the zero point, None for zero, that statistics have taken of it."""

    name: str
    statistics: TensorStatistics
    scale: Tensor
    zero_point: Tensor | None

    @property
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed."""
        return bool(self.statistics.roundings)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack the tensor that was observed, in whatever memory order; the seed is for random rounding."""
        form, zero_point = self.statistics.format, self.zero_point
        with as_it_is(x.device), _seeded(self.statistics.roundings, seed, x.device):
            if self.scale.numel() > 1 and 0 in x.stride():  # repeats of an element may get different codes
                x = x.contiguous()
            missing = grouped(x.isfinite().logical_not_(), form.group)
            scale, flagged = self._flagged(missing)
            finite = without_missing(x)
            values = form.values(finite if x.dim() else finite.reshape(1), scale, zero_point)
            if values.shape != missing.shape:
                raise ValueError(
                    f"a scale of shape {tuple(self.scale.shape)} of {self.name} does not fit an activation of shape "
                    f"{tuple(x.shape)}; per_channel_broadcastable_shape= and group_dim= must"
                )
            if x.dtype == torch.float16:  # in which Brevitas' lower bound of scales is zero
                values = values.masked_fill(scale == 0, 0)
            kind, zero_kind = form.stored(scale, zero_point)
            decoder = ScaledCodes(
                codes=form.codes, dtype=values.dtype, scale=kind, zero_point=zero_kind, group=form.group
            )
            return decoder.pack(values, scale, zero_point, Layout.of(x), missing, flagged)

    def _flagged(self, missing: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales, and which of them are flagged; None where a code is spare. No waiting for the device."""
        form = self.statistics.format
        if form.codes.has_spare:
            return self.scale, None
        flagged = _any(missing, self.scale)
        kind, _ = form.stored(self.scale, self.zero_point)
        return torch.where(flagged, kind.of_flagged(self.scale), self.scale), flagged


def without_missing(x: Tensor) -> Tensor:
    """The tensor with zeros in place of elements that are not finite: of no effect on ranges that hold zero."""
    return x.nan_to_num(0.0, 0.0, 0.0)


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


def _any(missing: Tensor, scale: Tensor) -> Tensor:
    """Which scales, whose shape broadcasts against that of the mask, scale a missing element."""
    lead = missing.dim() - scale.dim()
    dims = [dim for dim in range(missing.dim()) if dim < lead or scale.shape[dim - lead] == 1]
    return (missing.any(dims, keepdim=True) if dims else missing).reshape(scale.shape)
