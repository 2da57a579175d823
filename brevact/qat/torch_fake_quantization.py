"""Fake quantization by torch's own ops, as the modules of ``torch.ao`` and ``torchao`` call them.

y = (clip(round(x / s) + z, q_min, q_max) - z) s. Torch saves a mask of clipped elements, here one bit per element. Ops
that save y save the integers, in as many bits as their range needs (``known_values``): the gradients are torch's to the
last bit. Source: torch.fake_quantize_per_tensor_affine.

torchao's own ops compute y = (clip(round(x (1 / s)) + z, q_min, q_max) - z) s. If x is an activation, ops that save y
save the integers, in as many bits as their range needs (``known_values``). If x is a weight, only it, the scale and the
zero point are saved: backward runs torchao's function on them again, so the gradients of all three are torchao's to the
last bit. Source: torchao.quantization.quant_primitives.

If torchao is imported, entering a packing region replaces its functions. Outside packing regions, in traced graphs and
for unknown settings (per-group scales of an activation, floating-point zero points) torchao's own run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.call_arguments import is_plain
from brevact.autograd.deriving import known_values
from brevact.autograd.ops.base import compute_from_weight
from brevact.autograd.ops.op import EXACT, Op, Saves, Stored
from brevact.autograd.region.running import packing_region, when_imported
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import Region
from brevact.private_names.of_torchao import FAKE_QUANTIZATION
from brevact.qat import integer_codes
from brevact.quantizers import Layout


def _along(axis: int | None, statistic: Any, out: Tensor) -> Tensor:
    found = torch.as_tensor(statistic, device=out.device).detach().to(torch.float32, copy=True)
    if axis is None:
        return found.reshape(())
    return found.view([-1 if dim == axis % out.dim() else 1 for dim in range(out.dim())])


def _register_integers(out: Tensor, scale: Any, zero_point: Any, axis: int | None, low: int, high: int) -> None:
    s, z = _along(axis, scale, out), _along(axis, zero_point, out)
    q = (out.detach() / s.masked_fill(s == 0, 1.0)).round_().add_(z)
    decoder = integer_codes.IntegerCodes(Layout.of(q), (high - low).bit_length(), low, out.nbytes)
    known_values.register(out, decoder.encode(q, z, s), decoder)


_SCALED = "input", "scale", "zero_point", "quant_min", "quant_max"
_OF_CHANNELS = "input", "scale", "zero_point", "axis", "quant_min", "quant_max"
_FUSED = (
    *("input", "observer_on", "fake_quant_on", "running_min", "running_max", "scale", "zero_point"),
    *("averaging_const", "quant_min", "quant_max", "axis", "per_row_fake_quant", "symmetric_quant"),
)
_NAMES = {"self": "input", "x": "input", "ch_axis": "axis"}


def _quantized(names: tuple[str, ...], region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run torch's op, whose mask the hooks save in bits, and register its integers."""
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | {
        _NAMES.get(name, name): x for name, x in kwargs.items()
    }
    input: Any = given.get("input")
    low, high, zero_point = (given.get(name) for name in ("quant_min", "quant_max", "zero_point"))
    if not (region.can_pack_input(input) and input.requires_grad and input.dtype is torch.float32):
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


class _Codes(integer_codes.IntegerCodes):
    """Decoder of (q - z) s in the activation's dtype; the product with a wider scale may have another one."""

    __slots__ = ()

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return integer_codes.IntegerCodes.decode(self, tensors).to(self.layout.dtype)


def fake_quantize_affine(
    stock: Callable[..., Any],
    input: Any,
    block_size: Any,
    scale: Any,
    zero_point: Any,
    quant_dtype: Any,
    quant_min: Any = None,
    quant_max: Any = None,
    *domain: Any,
    **named_domain: Any,
) -> Any:
    def call(x: Tensor, scale: Tensor, zero_point: Tensor) -> Any:
        return stock(x, block_size, scale, zero_point, quant_dtype, quant_min, quant_max, *domain, **named_domain)

    region = packing_region()
    if (
        region is None
        or not all(map(is_plain, (input, scale, zero_point)))
        or input.numel() < region.settings.min_numel
    ):
        return call(input, scale, zero_point)
    if region.is_weight(input):
        return _of_weight(region, call, input, scale, zero_point)
    q, out = call(input, scale, zero_point)
    is_small = isinstance(quant_min, int) and isinstance(quant_max, int) and 0 < quant_max - quant_min < 256
    is_integer = [getattr(each, "name", "") for each in (*domain, *named_domain.values())] == ["INT"]
    is_known = len(block_size) == input.dim() and all(
        block in (1, size) for block, size in zip(block_size, input.shape, strict=True)
    )
    if is_small and is_integer and is_known and out.requires_grad:
        sizes = [1 if block == size else size for block, size in zip(block_size, input.shape, strict=True)]
        with torch.no_grad(), region.hooks.suspended:
            s, z = scale.detach().view(sizes), zero_point.detach().view(sizes).to(out.dtype)
            codes = q.detach().to(out.dtype)
            decoder = _Codes(Layout.of(codes), (quant_max - quant_min).bit_length(), quant_min, 1, out.nbytes)
            known_values.register(out, decoder.encode(codes, z, s), decoder)
    return q, out


def _of_weight(region: Any, call: Callable[..., Any], *given: Tensor) -> tuple[Tensor, Tensor]:
    integers: list[Tensor] = []

    def values(*given: Tensor) -> Tensor:
        q, out = call(*given)
        if not integers:  # in forward; they must not live as long as the graph
            integers.append(q.detach())
        return out

    storage_report.report_op(fake_quantize_affine)
    out = compute_from_weight(region, values, *given)
    q, integers[0] = integers[0], given[0].detach()
    return q, out


def _replace(owner: Any, name: str, counterpart: Callable[..., Any]) -> None:
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def ask(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return stock(*args, **kwargs)
        return counterpart(stock, *args, **kwargs)

    setattr(owner, name, ask)


when_imported(  # other releases run torchao's own ops, packed like any others
    *FAKE_QUANTIZATION, lambda: _replace(sys.modules[FAKE_QUANTIZATION[0]], FAKE_QUANTIZATION[1], fake_quantize_affine)
)
