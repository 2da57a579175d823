"""Norms: the normalized input x^ = (x - mean) * invstd is saved packed, the inverse deviations in full precision.

Backward is PyTorch's own formula on x^ / invstd, the input less its means, which suits it as well as the input. It
reads x^ twice, so that one packed copy leaves a bias of Var[x^] g / N per element: negligible for the N of a feature
map. Source: ActNN, arXiv:2104.14129, appendix B.2. Differs: the input is normalized before it is quantized, so that
groups with different scales in one bucket do not add their noise to each other's gradients. Batch norm by batch
statistics packs its input by a plan if it can (``BatchNorm.packing``), and a kernel computes its gradients, whatever is
around the region. Without a plan, torch's own op runs on x^ / invstd where possible, as for convolutions.

A quantizer with ``for_normalized`` saves x^ on a fixed grid. If a group has NaN or an infinity, its invstd and its
gradients are NaN. With ``quantize_forward`` the affine step reads the saved values in place of x^, and the gradient
passes straight through: out = weight * x^ + bias, rounded. Source: Graham, arXiv:1702.08231, sections 1.3 to 1.5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.derived import derive_output
from brevact.autograd.held_outputs import take
from brevact.autograd.norm_decoders import Centred, Unpacked, along_channels, normalized_early, packed_decoder
from brevact.autograd.normalizing import NormInput
from brevact.autograd.ops.base import SavedValue, Saving, load, requires_grad, save
from brevact.autograd.ops.norm.formulas import (
    Frozen,
    Gradients,
    Norm,
    batch_norm,
    batch_norm_backward,
    packed_batch_norm_backward,
    runs_in_float32,
    sum_of_channels,
)
from brevact.autograd.saved import Keeper, Saved
from brevact.autograd.settings import SaveMode
from brevact.autograd.storages import is_tracked
from brevact.autograd.weights import ModelState
from brevact.quantizers import kernel_ops
from brevact.quantizers.backends import cpu_kernels


def reacts(region: Keeper, input: Any, weight: Tensor | None, bias: Tensor | None, *, has_mean: bool = True) -> bool:
    if has_mean and region.settings.quantizes_forward:
        return region.is_activation(input) and input.numel() > 0
    return region.packs_layer_input(input) and input.numel() > 0 and requires_grad(input, weight, bias)


def apply(region: Keeper, norm: Norm, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    rounds = norm.has_mean and region.settings.quantizes_forward
    if not rounds or (torch.is_grad_enabled() and requires_grad(input, weight, bias)):
        out: Tensor = region.apply(_Normalization, norm, input, weight, bias)
        ModelState.mark_activation(out)
        return out
    x, w, b = _to_autocast(norm, input, weight, bias)
    return _run_levels(region, norm, input, x, w, b)[0]


class _Normalization(Saving):
    @staticmethod
    def forward(
        ctx: Any, region: Keeper, norm: Norm, input: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        is_frozen = isinstance(norm, Frozen)  # only its weight's gradient reads the input
        reads_x = ctx.needs_input_grad[3] or (ctx.needs_input_grad[2] and not is_frozen)
        x, w, b = _to_autocast(norm, input, weight, bias)
        kept: Saved | None
        mark = None
        ctx.norm, ctx.dtypes = norm, (x.dtype, None if w is None else w.dtype)
        if norm.packing is not None and _packs_anew(region, input):
            out, kept, given = _run_planned(region, norm, input, weight, bias)
        elif (
            norm.has_mean
            and region.settings.for_normalized is not None
            and (not is_frozen or region.settings.quantizes_forward)
        ):
            out, kept, given, mark = _run_levels(region, norm, input, x, w, b)
        else:
            out, mean, spread = norm.forward(x, w, b)
            given = NormInput(norm, mean, spread, x.dtype)
            kept = region.keep(input, norm=given) if reads_x else None
        if reads_x:
            derive_output(region, given, kept, out, w, b)
            save(ctx, kept, exact=(weight, None, mark))
        else:
            save(ctx, None, exact=(weight, given.spread, None) if is_frozen else (None, None, None))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, spread, mark = load(ctx)
        norm, mask = ctx.norm, list(ctx.needs_input_grad[2:5])
        grad_input = grad_weight = None
        packing = norm.packing
        if packing is not None and kept is not None and isinstance(kept.decoder, Centred):
            buffer, invstd = kept.decoder.packed(kept.tensors).buffer, kept.tensors[-1]
            return None, None, *packed_batch_norm_backward(packing, buffer, grad, weight, invstd, norm.eps, mask)
        if kept is not None:
            dtype, weight_dtype = ctx.dtypes
            of_kernels = packing is not None and dtype is torch.float32
            if of_kernels and isinstance(kept.decoder, Unpacked) and kept.decoder.quality.cost:
                return None, None, *_backward_of_recomputed(norm, kept, grad, weight, mask)
            x, mean, invstd = kept.with_statistics()
            x = x if x.dtype is dtype else x.to(dtype)
            w = weight if weight is None or weight.dtype is weight_dtype else weight.to(weight_dtype)
            wanted = [*mask[:2], mask[2] and w is not None]  # without a weight, ATen computes no gradient for the bias
            grad_input, grad_weight, grad_bias = norm.backward(grad, x, mean, invstd, w, wanted)
            grad_weight = grad_weight if mark is None else grad_weight + mark
            if wanted == mask:
                return None, None, grad_input, grad_weight, grad_bias
        elif spread is not None and mask[0]:
            factor = norm.alignment.inverse(spread) if weight is None else weight * norm.alignment.inverse(spread)
            grad_input = grad * along_channels(factor.to(grad.dtype), grad.shape)
        return None, None, grad_input, grad_weight, norm.bias_gradient(grad) if mask[2] else None


def _packs_anew(region: Any, input: Tensor) -> bool:
    """Whether a batch norm with a plan just packs its input: no saved form is known, and no report is active."""
    is_plain = region.settings.save_mode is SaveMode.SAVE_QUANTIZED and not region.is_counted
    return is_plain and not (storage_report.recorders or input.is_inference() or is_tracked(input))


def _run_planned(
    region: Any, norm: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Saved, NormInput]:
    """Run a batch norm, and pack its input by the same kernel if there is one."""
    spec, uniform, place, *_ = norm.packing
    seed = region.seeds.next(input.device) if spec.quantizer.is_stochastic else None
    buffer = spec.empty(input)
    given: tuple[Any, ...] = input, weight, bias, *norm.running, norm.momentum, norm.eps
    kernels = cpu_kernels() if input.is_cpu else None
    found: Any = NotImplemented
    if kernels is not None:
        found = kernels.packed_batch_norm(*given, uniform, seed, place, buffer)
    if found is NotImplemented:
        run: Any = batch_norm.reference if kernels is None else batch_norm
        found = run(*given, norm.cudnn_enabled)
        kernel_ops.quantize_normalized(input, uniform, seed, found[1], found[2], place, buffer)
    out, mean, invstd = found
    of_norm = NormInput(norm, mean, invstd, input.dtype)
    kept = (buffer, invstd), packed_decoder(norm.alignment, spec, input.dtype)
    region.share_normalized(input, of_norm.key, *kept)
    return out, kept, of_norm


def _backward_of_recomputed(
    norm: Any, kept: SavedValue, grad: Tensor, weight: Tensor | None, mask: list[bool]
) -> Gradients:
    """Gradients of a batch norm with a plan, from a recomputed input, whose memory they may reuse."""
    source, decoder = kept.decoder.without_statistics(kept.tensors)
    x, is_owned = take(decoder, source)
    mean, invstd = kept.tensors[-2:]
    return batch_norm_backward(grad, x, weight, mean, invstd, norm.eps, mask, is_owned)


def _run_levels(
    region: Keeper, norm: Norm, input: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Saved, NormInput, Tensor | None]:
    """Output, saved form of the normalized input, statistics, and, if these are constant, a zero per channel.

    For a non-finite group, the inverse deviation or the zero is NaN.
    """
    out, mean, spread = norm.forward(x, weight, bias)
    assert mean is not None
    is_frozen = isinstance(norm, Frozen)
    spread = spread if is_frozen else mean * 0 + spread
    mark = x * 0 if is_frozen else norm.alignment.align(spread - spread, x.shape)
    given = NormInput(norm, mean, spread, x.dtype)
    kept = region.keep_levels(input, given)
    if region.settings.quantizes_forward:
        _write_affine(out, norm, kept, mark, weight, bias)
    return out, kept, given, sum_of_channels(mark) if is_frozen else None


def _write_affine(
    out: Tensor, norm: Norm, kept: Saved, mark: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Overwrite ``out`` with weight * N^ + bias, N^ being packed; ``mark`` is 0, or NaN where N(x) is not finite."""
    levels = normalized_early(kept) + mark
    if weight is not None:
        levels.mul_(norm.alignment.align_weight(weight, levels.shape))
    if bias is not None:
        levels.add_(norm.alignment.align_weight(bias, levels.shape))
    out.copy_(levels)


def _to_autocast(norm: Norm, *tensors: Any) -> tuple[Any, ...]:
    if not runs_in_float32(norm.name, tensors[0]):
        return tensors
    return tuple(x.float() if x is not None and x.dtype is not torch.float64 else x for x in tensors)
