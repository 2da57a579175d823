"""Batch norm whose input is packed by a plan: the same bytes and gradients, with a fraction of the calls.

In small feature maps the calls around the kernels take more time than the kernels. What depends on sizes alone is in a
plan, found again in each step; what a region would ask on the way is answered by few conditions, all of which a plain
training step of a convolutional net fulfils. Where one is not, torch's own op runs, and hooks keep its input.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brevact.autograd import known_values
from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.normalizing import OutputDecoder, PackedDecoder, as_now, output_decoder, packed_decoder
from brevact.autograd.ops.base import NO_DOUBLE_BACKWARD, Saving
from brevact.autograd.ops.norm.alignments import OverChannels
from brevact.autograd.ops.norm.formulas import BatchNorm, batch_norm_backward
from brevact.autograd.settings import SaveMode
from brevact.autograd.sharing import Slot
from brevact.autograd.store import slot_of
from brevact.autograd.weights import ModelState
from brevact.quantizers import Layout
from brevact.quantizers.normalizing_plans import NormalizedPlan, plan_of_channels

_is_grad_enabled = torch.is_grad_enabled
_OVER_CHANNELS = OverChannels()


class _Plan(NamedTuple):
    """What depends on the sizes of a call alone.

    Args:
        packing: how the input is packed.
        source: decoder of the input, by which its packed values are shared.
        output: decoder of the output.
    """

    packing: NormalizedPlan
    source: PackedDecoder
    output: OutputDecoder


@functools.lru_cache(maxsize=4096)
def _plan_of(quantizer: Any, layout: Layout, has_weight: bool, has_bias: bool) -> _Plan | None:
    packing = plan_of_channels(quantizer, layout)
    if packing is None or torch.Size(layout.shape).numel() != layout.numel:
        return None
    source = packed_decoder(_OVER_CHANNELS, packing.spec, layout.dtype)
    shape = torch.Size(layout.shape)
    output = output_decoder(_OVER_CHANNELS, source, 1, (has_weight, has_bias), shape, layout.dtype)
    return _Plan(packing, source, output)


class _PlannedBatchNorm(Saving):
    @staticmethod
    def forward(
        ctx: Any,
        region: EagerKeeper,
        plan: _Plan,
        norm: BatchNorm,
        slot: Slot | None,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        out, mean, invstd = norm.forward(input, weight, bias)
        packing = plan.packing
        seed = region.seeds.next(input.device) if packing.spec.quantizer.is_stochastic else None
        buffer = packing.quantize(input, mean, invstd, seed)
        if slot is not None:
            slot.fill((buffer, invstd), plan.source)
        if region.settings.derives and out.stride() == packing.spec.layout.result_stride:
            affine = tuple([as_now(x, x is weight) for x in (weight, bias) if x is not None])
            known_values.register_new(out, (buffer, *affine), plan.output)
        ctx.save_for_backward(buffer, invstd, weight)
        ctx.packing, ctx.eps = packing, norm.eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if _is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        buffer, invstd, weight = ctx.saved_tensors
        x = ctx.packing.dequantize_centred(buffer, invstd)
        statistics = None, None, torch.zeros_like(invstd), invstd
        mask = list(ctx.needs_input_grad[4:])
        return None, None, None, None, *batch_norm_backward(grad, x, weight, *statistics, True, ctx.eps, mask)


def run(
    region: EagerKeeper, norm: BatchNorm, input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Run a batch norm by the statistics of the batch, which packs its input.

    Args:
        region: the region, in which torch's own op might run.
        norm: the norm.
        input: its input, an activation.
        weight: one number a channel, or None.
        bias: as well.

    Returns:
        The output; None where more is to be done than to pack the input and to derive the output from it: hooks around
        the region want to see what is kept, a report is written, something is known of the input, or an argument is of
        another kind than in most nets.
    """
    settings = region.settings
    if settings.save_mode is not SaveMode.SAVE_QUANTIZED or region.is_watched() or not input.is_cpu:
        return None
    if (weight is None and bias is not None) or not (_is_plain(weight) and _is_plain(bias)) or input._is_view():
        return None
    if input.numel() < settings.min_numel or input.is_neg() or known_values.is_marked(input):
        return None
    plan = _plan_of(settings.quantizer, Layout.of(input), weight is not None, bias is not None)
    if plan is None:
        return None
    slot = slot_of(input, settings, False, (norm.key, input.dtype))
    if slot is not None and slot.found is not None:
        return None
    out: Tensor = region.apply(_PlannedBatchNorm, plan, norm, slot, input, weight, bias)
    ModelState.mark_activation(out)
    return out


def _is_plain(weight: Tensor | None) -> bool:
    """Whether a weight is a float32 parameter on the CPU, as layers have it, or there is none."""
    return weight is None or (type(weight) is nn.Parameter and weight.dtype is torch.float32 and weight.is_cpu)
