"""Fake quantization by torch's own ops, as the modules of ``torch.ao`` and ``torchao`` call them.

y = (clip(round(x / s) + z, q_min, q_max) - z) s. Torch saves a mask of clipped elements, here one bit per element. Ops
that save y save the integers, in as many bits as their range needs (``known_values``): the gradients are torch's to the
last bit. Source: torch.fake_quantize_per_tensor_affine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd import known_values
from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.ops.op import EXACT, Op, Saves, Stored
from brevact.quantizers import Layout, is_traced


def _along(axis: int | None, statistic: Any, out: Tensor) -> Tensor:
    """Copy a scale or a zero point to a float32 tensor that broadcasts to the result."""
    found = torch.as_tensor(statistic, device=out.device).detach().to(torch.float32, copy=True)
    if axis is None:
        return found.reshape(())
    return found.view([-1 if dim == axis % out.dim() else 1 for dim in range(out.dim())])


def _register_integers(out: Tensor, scale: Any, zero_point: Any, axis: int | None, low: int, high: int) -> None:
    """Register the integers of a result: ops that save the result save these."""
    s, z = _along(axis, scale, out), _along(axis, zero_point, out)
    q = (out.detach() / s.masked_fill(s == 0, 1.0)).round_().add_(z)
    decoder = known_values.IntegerCodes(Layout.of(q), (high - low).bit_length(), low, 1, out.nbytes)
    known_values.register(out, decoder.encode(q, z, s), decoder)


def _run(
    region: EagerKeeper,
    call: Callable[[Tensor], Tensor],
    input: Any,
    scale: Any,
    zero_point: Any,
    axis: int | None,
    low: Any,
    high: Any,
) -> Any:
    """Run torch's op, whose mask the hooks save in bits, and register its integers; or return NotImplemented."""
    if not (region.packs_input(input) and input.requires_grad and input.dtype is torch.float32):
        return NotImplemented
    if is_traced(input) or input.numel() < max(region.settings.min_numel, 1) or region.is_weight(input):
        return NotImplemented
    if not (isinstance(low, int) and isinstance(high, int) and 0 < high - low < 256):
        return NotImplemented
    runner = region.torch_runner(input)
    if runner is None:
        return NotImplemented
    out = runner.run_torch_function(call, input)
    _register_integers(out, scale, zero_point, axis, low, high)
    return out


def _per_tensor(
    region: EagerKeeper, func: Callable, input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> Any:
    bounds = quant_min, quant_max
    return _run(region, lambda x: func(x, scale, zero_point, *bounds), input, scale, zero_point, None, *bounds)


def _per_channel(
    region: EagerKeeper,
    func: Callable,
    input: Any,
    scale: Any,
    zero_point: Any,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> Any:
    if isinstance(zero_point, Tensor) and zero_point.is_floating_point():
        return NotImplemented  # torch computes (q - z) s with more digits there
    bounds = quant_min, quant_max
    return _run(region, lambda x: func(x, scale, zero_point, axis, *bounds), input, scale, zero_point, axis, *bounds)


def _fused(
    region: EagerKeeper,
    func: Callable,
    x: Any,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> Any:
    """Observe, and quantize by the current scale, which the op itself writes."""
    others: tuple[Any, ...] = (observer_on, fake_quant_on, running_min, running_max, scale, zero_point, averaging_const)
    others += (quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant)
    if not (isinstance(fake_quant_on, Tensor) and fake_quant_on.is_cpu and bool(fake_quant_on)):
        return NotImplemented
    axis = ch_axis if per_row_fake_quant else None
    return _run(region, lambda x: func(x, *others), x, scale, zero_point, axis, quant_min, quant_max)


_STORED = Stored("fake quantization of torch.ao", "the integers that it returns, exactly, and a mask", EXACT)
OPS = (
    Op((torch.fake_quantize_per_tensor_affine,), _per_tensor, _STORED),
    Op((torch.fake_quantize_per_channel_affine,), _per_channel, _STORED),
    Op((torch.fused_moving_avg_obs_fake_quant,), _fused, _STORED, saves=Saves.PLACES),
)
