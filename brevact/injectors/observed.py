"""A tensor's quantizer with its observed scale, to run in the forward pass or when backward starts."""

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
    """Quantizes one tensor with the scale and the zero point, None for zero, that statistics took from it."""

    name: str
    statistics: TensorStatistics
    scale: Tensor
    zero_point: Tensor | None

    @property
    def is_stochastic(self) -> bool:
        """Whether the codes depend on the seed."""
        return bool(self.statistics.roundings)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack the observed tensor, in any memory order; the seed is for stochastic rounding."""
        form, zero_point = self.statistics.format, self.zero_point
        with as_it_is(x.device), _seeded(self.statistics.roundings, seed, x.device):
            if self.scale.numel() > 1 and 0 in x.stride():  # copies of an expanded element may get different codes
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
        """Scales, and a mask of the flagged ones, None if a code is spare; does not wait for the device."""
        form = self.statistics.format
        if form.codes.has_spare:
            return self.scale, None
        flagged = _any(missing, self.scale)
        kind, _ = form.stored(self.scale, self.zero_point)
        return torch.where(flagged, kind.of_flagged(self.scale), self.scale), flagged


def without_missing(x: Tensor) -> Tensor:
    """The tensor with zeros in place of non-finite elements: no effect on ranges that contain zero."""
    return x.nan_to_num(0.0, 0.0, 0.0)


@contextmanager
def as_it_is(device: torch.device) -> Iterator[None]:
    """Compute without gradients and without autocast."""
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
    """Mask of the scales, whose shape broadcasts against the mask `missing`, that scale a missing element."""
    lead = missing.dim() - scale.dim()
    dims = [dim for dim in range(missing.dim()) if dim < lead or scale.shape[dim - lead] == 1]
    return (missing.any(dims, keepdim=True) if dims else missing).reshape(scale.shape)
