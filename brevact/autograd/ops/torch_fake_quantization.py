"""Fake quantization by torch's own ops, as the modules of ``torch.ao`` and ``torchao`` call them.

y = (clip(round(x / s) + z, q_min, q_max) - z) s. Torch saves a mask of clipped elements, here one bit per element. Ops
that save y save the integers, in as many bits as their range needs (``known_values``): the gradients are torch's to the
last bit. Source: torch.fake_quantize_per_tensor_affine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd import known_values
from brevact.autograd.ops.op import EXACT, Op, Saves, Stored
from brevact.autograd.saved import Keeper
from brevact.quantizers import Layout


def _along(axis: int | None, statistic: Any, out: Tensor) -> Tensor:
    found = torch.as_tensor(statistic, device=out.device).detach().to(torch.float32, copy=True)
    if axis is None:
        return found.reshape(())
    return found.view([-1 if dim == axis % out.dim() else 1 for dim in range(out.dim())])


def _register_integers(out: Tensor, scale: Any, zero_point: Any, axis: int | None, low: int, high: int) -> None:
    s, z = _along(axis, scale, out), _along(axis, zero_point, out)
    q = (out.detach() / s.masked_fill(s == 0, 1.0)).round_().add_(z)
    decoder = known_values.IntegerCodes(Layout.of(q), (high - low).bit_length(), low, 1, out.nbytes)
    known_values.register(out, decoder.encode(q, z, s), decoder)


_SCALED = "input", "scale", "zero_point", "quant_min", "quant_max"
_OF_CHANNELS = "input", "scale", "zero_point", "axis", "quant_min", "quant_max"
_FUSED = (
    *("input", "observer_on", "fake_quant_on", "running_min", "running_max", "scale", "zero_point"),
    *("averaging_const", "quant_min", "quant_max", "axis", "per_row_fake_quant", "symmetric_quant"),
)
_NAMES = {"self": "input", "x": "input", "ch_axis": "axis"}


def _quantized(names: tuple[str, ...], region: Keeper, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run torch's op, whose mask the hooks save in bits, and register its integers."""
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | {
        _NAMES.get(name, name): x for name, x in kwargs.items()
    }
    input: Any = given.get("input")
    low, high, zero_point = (given.get(name) for name in ("quant_min", "quant_max", "zero_point"))
    if not (region.packs_input(input) and input.requires_grad and input.dtype is torch.float32):
        return NotImplemented
    if input.numel() < max(region.settings.min_numel, 1) or region.is_weight(input):
        return NotImplemented
    if not (isinstance(low, int) and isinstance(high, int) and 0 < high - low < 256):
        return NotImplemented
    axis, is_on = given.get("axis"), given.get("fake_quant_on")
    if names is _FUSED:  # it observes, and quantizes by the current scale, which the op itself writes
        if not (isinstance(is_on, Tensor) and is_on.is_cpu and bool(is_on)):
            return NotImplemented
        axis = axis if given.get("per_row_fake_quant") else None
    elif axis is not None and isinstance(zero_point, Tensor) and zero_point.is_floating_point():
        return NotImplemented  # torch computes (q - z) s with more digits there
    runner = region.torch_runner(input)
    if runner is None:
        return NotImplemented
    out = runner.run_torch_function(lambda x: func(*args, **kwargs), input)
    _register_integers(out, given["scale"], zero_point, axis, low, high)
    return out


_STORED = Stored("fake quantization of torch.ao", "the integers that it returns, exactly, and a mask", EXACT)
OPS = (
    Op((torch.fake_quantize_per_tensor_affine,), functools.partial(_quantized, _SCALED), _STORED),
    Op((torch.fake_quantize_per_channel_affine,), functools.partial(_quantized, _OF_CHANNELS), _STORED),
    Op((torch.fused_moving_avg_obs_fake_quant,), functools.partial(_quantized, _FUSED), _STORED, saves=Saves.PLACES),
)
