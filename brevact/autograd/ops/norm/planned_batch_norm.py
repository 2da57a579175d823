"""Batch norm whose input is packed by a plan: the same bytes and gradients as by ``functions``, in fewer calls.

For small feature maps the calls around the kernels take longer than the kernels. A plan holds values that depend on
sizes alone and is found again in each step (:func:`find_plan`). If a saved form of the input is known, or a report is
active, `functions` runs the norm by the same kernel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brevact.autograd import known_values, storage_report
from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.norm_decoders import OutputDecoder, PackedDecoder, output_decoder, packed_decoder
from brevact.autograd.ops.base import Saving
from brevact.autograd.ops.norm.alignments import OverChannels
from brevact.autograd.ops.norm.formulas import (
    BatchNorm,
    packed_batch_norm,
    packed_batch_norm_backward,
    runs_in_float32,
)
from brevact.autograd.saved import NO_DOUBLE_BACKWARD
from brevact.autograd.settings import BackwardSettings, SaveMode
from brevact.autograd.storages import is_tracked
from brevact.autograd.weights import ModelState, is_parameter
from brevact.quantizers import Layout
from brevact.quantizers.normalizing_plans import NormalizedPlan, plan_of_channels

_is_grad_enabled = torch.is_grad_enabled
_OVER_CHANNELS = OverChannels()


class _Plan(NamedTuple):
    """Constants for a call's sizes: how the input is packed, and the decoders of input and output."""

    packing: NormalizedPlan
    source: PackedDecoder
    output: OutputDecoder


@functools.lru_cache(maxsize=4096)
def _plan_of(
    quantizer: Any,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    of_weight: torch.Size | None,
    of_bias: torch.Size | None,
) -> _Plan | None:
    """Return the plan for tensors of these sizes, the same in each step, or None."""
    layout = Layout.of_sizes(shape, stride, dtype)
    packing = plan_of_channels(quantizer, layout)
    if packing is None or not shape.numel() == layout.numel > shape[1]:
        return None
    if any(sizes not in (None, shape[1:2]) for sizes in (of_weight, of_bias)) or (of_weight is None and of_bias):
        return None
    source = packed_decoder(_OVER_CHANNELS, packing.spec, dtype)
    has, decoding = (of_weight is not None, of_bias is not None), packing if of_weight is not None else None
    return _Plan(packing, source, output_decoder(_OVER_CHANNELS, source, 1, has, shape, dtype, decoding))


class _PlannedBatchNorm(Saving):
    returns_new = True

    @staticmethod
    def forward(
        ctx: Any,
        region: EagerKeeper,
        plan: _Plan,
        settings: tuple[Tensor | None, Tensor | None, float, float, bool],
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        spec, uniform, place, *_ = plan.packing
        eps = settings[3]
        seed = region.seeds.next(input.device) if spec.quantizer.is_stochastic else None
        buffer = spec.empty(input)
        out, _, invstd = packed_batch_norm(input, weight, bias, *settings, uniform, seed, place, buffer)
        norm = (BatchNorm.name, eps), input.dtype
        region.share_normalized(input, norm, (buffer, invstd), plan.source)
        if region.settings.derives and out.stride() == spec.layout.result_stride:
            kept: tuple[Tensor, ...] = (buffer,)
            if weight is not None:  # their current values, see `as_now`
                kept += (weight.clone() if region.is_distributed else weight.detach(),)
            if bias is not None:
                kept += (bias.clone(),)
            known_values.register(out, kept, plan.output, scope=region.hooks.scope, is_new=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(buffer, invstd, weight)
        ctx.packing, ctx.eps = plan.packing, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if _is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        buffer, invstd, weight = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[3:])
        gradients = packed_batch_norm_backward(ctx.packing, buffer, grad, weight, invstd, ctx.eps, mask)
        return None, None, None, *gradients


def find_plan(
    settings: BackwardSettings,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> _Plan | None:
    """Return how batch norm by batch statistics packs its input, in any surroundings; None for unusual arguments."""
    if not getattr(settings.quantizer, "has_uniform_codes", False) or input.numel() < settings.min_numel:
        return None
    if type(eps) is not float or eps <= 0.0 or type(input) is not Tensor:
        return None
    if input._is_view() and (is_parameter(input._base) or input._base.numel() != input.numel()):  # type: ignore[union-attr]
        return None
    device = input.device
    for statistic in (running_mean, running_var):  # tensors without gradient, as layers have them
        if statistic is not None and not (type(statistic) is Tensor and statistic.device == device):
            return None
        if statistic is not None and statistic.requires_grad:
            return None
    for y in (weight, bias):
        if y is not None and not (type(y) is nn.Parameter and y.dtype is torch.float32 and y.device == device):
            return None
    if input.is_neg() or input.layout is not torch.strided:
        return None
    if input.dtype is not torch.float32 and (weight is None or runs_in_float32(BatchNorm.name, input)):
        return None  # its statistics may have its dtype, or autocast casts it
    of_weight, of_bias = None if weight is None else weight.shape, None if bias is None else bias.shape
    return _plan_of(settings.quantizer, input.shape, input.stride(), input.dtype, of_weight, of_bias)


def packs_anew(region: EagerKeeper, input: Tensor) -> bool:
    """Return whether a batch norm with a plan just packs its input: no saved form is known, and no report is active."""
    is_plain = region.settings.save_mode is SaveMode.SAVE_QUANTIZED and not region.is_counted
    return is_plain and not (storage_report.recorders or input.is_inference() or is_tracked(input))


def run(
    region: EagerKeeper,
    plan: _Plan,
    norm: BatchNorm,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Run a batch norm by batch statistics and pack its input anew (:func:`packs_anew`)."""
    settings = norm.running_mean, norm.running_var, norm.momentum, norm.eps, norm.cudnn_enabled
    out: Tensor = region.apply(_PlannedBatchNorm, plan, settings, input, weight, bias)
    ModelState.mark_activation(out)
    return out
