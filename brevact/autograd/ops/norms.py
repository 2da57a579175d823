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

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd.call_arguments import Parameters
from brevact.autograd.deriving.derived import derive_output
from brevact.autograd.deriving.layers import take
from brevact.autograd.deriving.norms import Centred, NormInput, Unpacked, along_channels, packed_decoder
from brevact.autograd.ops.base import Formula, Needs, SavedValue, requires_grad, save
from brevact.autograd.ops.norm_formulas import (
    BatchNorm,
    Frozen,
    Gradients,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    Mask,
    Norm,
    RMSNorm,
    batch_norm,
    batch_norm_backward,
    runs_in_float32,
    sum_of_channels,
)
from brevact.autograd.ops.op import Op, Stored, everywhere
from brevact.autograd.region.settings import BackwardSettings, SaveMode
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import Region, Saved, Weight
from brevact.autograd.saving.storages import is_tracked, share_packed
from brevact.autograd.saving.weights import is_parameter
from brevact.quantizers import Layout, kernel_ops
from brevact.quantizers.normalizing import NormalizedPlan, has_uniform_codes, plan_of_channels


def _run(region: Region, norm: Norm, input: Tensor, weight: Weight, bias: Weight) -> Any:
    settings, trains = region.settings, requires_grad(input, weight, bias)
    rounds = norm.has_mean and settings.quantizes_forward
    is_handled = region.is_activation(input) if rounds else region.can_pack_layer_input(input) and trains
    if not (is_handled and input.numel()):
        return NotImplemented
    if settings.double_backward:  # torch's own norm, whose input is packed, and not its normalized values
        runner = None if isinstance(norm, Frozen) or rounds else region.torch_runner(input, *norm.running)
        if runner is None or (weight is not None and weight.dim() >= input.dim()):
            return NotImplemented
        return runner.run_torch_function(lambda x: norm.forward(x, weight, bias)[0], input)
    if rounds and not (torch.is_grad_enabled() and trains):
        return _run_levels(region, norm, input, *_to_autocast(norm, input, weight, bias))[0]
    if type(norm) is BatchNorm and requires_grad(input, weight) and settings.for_normalized is None:
        norm.packing = _plan_of_call(settings, norm, input, weight, bias)
    out: Tensor = region.apply(Formula, functools.partial(_save, region, norm), None, input, weight, bias)
    region.mark(out, is_weight=False)
    return out


def _save(region: Region, norm: Norm, ctx: Any, input: Tensor, weight: Weight, bias: Weight) -> Tensor:
    is_frozen = isinstance(norm, Frozen)  # only its weight's gradient reads the input
    reads_x = ctx.needs_input_grad[4] or (ctx.needs_input_grad[3] and not is_frozen)
    x, w, b = _to_autocast(norm, input, weight, bias)
    kept: Saved | None
    mark = None
    ctx.gradients = functools.partial(_gradients, norm, x.dtype, None if w is None else w.dtype)
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


def _gradients(norm: Any, dtype: torch.dtype, weight_dtype: Any, needs: Needs, grad: Tensor, *saved: Any) -> Gradients:
    kept, weight, spread, mark = saved
    mask, packing = list(needs), norm.packing
    grad_input = grad_weight = None
    if packing is not None and kept is not None and isinstance(kept.decoder, Centred):
        buffer, invstd = kept.decoder.packed(kept.tensors).buffer, kept.tensors[-1]
        x = packing.dequantize_centred(buffer, invstd)
        return batch_norm_backward(grad, x, weight, torch.zeros_like(invstd), invstd, norm.eps, mask, True)
    if kept is not None:
        of_kernels = packing is not None and dtype is torch.float32
        if of_kernels and isinstance(kept.decoder, Unpacked) and kept.decoder.quality.cost:
            return _backward_of_recomputed(norm, kept, grad, weight, mask)
        x, mean, invstd = kept.with_statistics()
        x = x if x.dtype is dtype else x.to(dtype)
        w = weight if weight is None or weight.dtype is weight_dtype else weight.to(weight_dtype)
        wanted = [*mask[:2], mask[2] and w is not None]  # without a weight, ATen computes no gradient for the bias
        grad_input, grad_weight, grad_bias = norm.backward(grad, x, mean, invstd, w, wanted)
        grad_weight = grad_weight if mark is None or grad_weight is None else grad_weight + mark
        if wanted == mask:
            return grad_input, grad_weight, grad_bias
    elif spread is not None and mask[0]:
        factor = norm.alignment.inverse(spread) if weight is None else weight * norm.alignment.inverse(spread)
        grad_input = grad * along_channels(factor.to(grad.dtype), grad.shape)
    return grad_input, grad_weight, norm.bias_gradient(grad) if mask[2] else None


def _packs_anew(region: Any, input: Tensor) -> bool:
    is_plain = region.settings.save_mode is SaveMode.SAVE_QUANTIZED and not region.is_counted
    return is_plain and not (storage_report.recorders or input.is_inference() or is_tracked(input))


def _run_planned(
    region: Any, norm: Any, input: Tensor, weight: Weight, bias: Weight
) -> tuple[Tensor, Saved, NormInput]:
    spec, uniform, place, *_ = norm.packing
    seed = region.seeds.next(input.device) if spec.quantizer.is_stochastic else None
    buffer = spec.empty(input)
    given: tuple[Any, ...] = input, weight, bias, *norm.running, norm.momentum, norm.eps
    run: Any = batch_norm if input.is_cpu else batch_norm.reference
    out, mean, invstd = run(*given, norm.cudnn_enabled)
    kernel_ops.quantize_uniform(input, uniform, seed, mean, invstd, place, buffer)
    of_norm = NormInput(norm, mean, invstd, input.dtype)
    kept = (buffer, invstd), packed_decoder(norm.alignment, spec, input.dtype)
    root = region.seeds.number if region.settings.is_random else 0
    share_packed(input, (region.settings.key, False, of_norm.key), *kept, root)
    return out, kept, of_norm


def _backward_of_recomputed(norm: Any, kept: SavedValue, grad: Tensor, weight: Weight, mask: Mask) -> Gradients:
    """Gradients of a batch norm with a plan, from a recomputed input, whose memory they may reuse."""
    source, decoder = kept.decoder.source(kept.tensors)
    x, is_owned = take(decoder, source)
    mean, invstd = kept.tensors[-2:]
    return batch_norm_backward(grad, x, weight, mean, invstd, norm.eps, mask, is_owned)


def _run_levels(
    region: Region, norm: Norm, input: Tensor, x: Tensor, weight: Weight, bias: Weight
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
    kept = region.keep_by(region.settings.for_normalized, input, given)
    if region.settings.quantizes_forward:
        _write_affine(out, norm, kept, mark, weight, bias)
    return out, kept, given, sum_of_channels(mark) if is_frozen else None


def _write_affine(out: Tensor, norm: Norm, kept: Saved, mark: Tensor, weight: Weight, bias: Weight) -> None:
    """Overwrite ``out`` with weight * N^ + bias, N^ being packed; ``mark`` is 0, or NaN where N(x) is not finite."""
    decoder: Any = kept[1]
    levels = decoder.packed(kept[0]).dequantize() + mark
    if weight is not None:
        levels.mul_(norm.alignment.align_weight(weight, levels.shape))
    if bias is not None:
        levels.add_(norm.alignment.align_weight(bias, levels.shape))
    out.copy_(levels)


def _to_autocast(norm: Norm, *tensors: Any) -> tuple[Any, ...]:
    if not runs_in_float32(norm.name, tensors[0]):
        return tensors
    return tuple(x.float() if x is not None and x.dtype is not torch.float64 else x for x in tensors)


def _fit(shape: tuple[int, ...], *weights: Any) -> bool:
    """Return whether weights are None, or tensors of this shape whose class does not override torch functions."""
    for x in weights:
        if x is not None and not (isinstance(x, Tensor) and x.shape == shape and not _has_rules(type(x))):
            return False
    return True


@functools.cache
def _has_rules(kind: type[Tensor]) -> bool:
    """Return whether a class overrides torch functions, as weights with per-sample gradients do."""
    rule = getattr(kind.__torch_function__, "__func__", None)  # nn.Parameter has none
    return rule is not None and rule is not Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def _made(name: str, func: Callable, given: dict[str, Any]) -> Norm | None:
    """Return a call's norm; None where torch raises the error, or weights have rules of their own."""
    input, weight, bias, eps = given["input"], given.get("weight"), given.get("bias"), given["eps"]
    if not isinstance(input, Tensor) or input.dim() == 0:
        return None
    if "normalized_shape" in given:
        shape = given["normalized_shape"]
        if not (isinstance(shape, tuple | list) and shape and tuple(input.shape[-len(shape) :]) == tuple(shape)):
            return None
        kind = LayerNorm if name == "layer_norm" else RMSNorm
        return kind(tuple(shape), eps) if _fit(tuple(shape), weight, bias) else None
    has_channels = input.dim() >= (3 if name == "instance_norm" else 2)
    if name == "group_norm":
        groups = given["num_groups"]
        is_known = has_channels and _fit((input.shape[1],), weight, bias) and groups > 0 and not input.shape[1] % groups
        return GroupNorm(groups, eps) if is_known and input.numel() != groups else None
    by_batch = given["training" if name == "batch_norm" else "use_input_stats"]
    if "cudnn_enabled" not in given:  # torch's Python functions check the sizes
        if by_batch and input.dim() >= 2 and input.numel() == math.prod(input.shape[name == "batch_norm" : 2]):
            return None  # of one number, torch raises the error
        if name == "batch_norm" and (not isinstance(eps, float | int) or eps <= 0):
            return None
    cudnn_enabled = given.get("cudnn_enabled", torch.backends.cudnn.enabled)
    if not isinstance(by_batch, bool) or cudnn_enabled is None:
        return None
    running = given["running_mean"], given["running_var"]
    if not (has_channels and _fit((input.shape[1],), weight, bias)):
        return None
    if not all([(x is None and by_batch) or (isinstance(x, Tensor) and not x.requires_grad) for x in running]):
        return None
    rest = given["momentum"], eps, cudnn_enabled
    if not by_batch:
        return Frozen(getattr(torch, name), *running, *rest)
    return (BatchNorm if name == "batch_norm" else InstanceNorm)(*running, *rest)


def _norm(name: str, region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
    given = _PARAMETERS[func].read(args, kwargs)
    norm = None if given is None else _made(name, func, given)
    if given is None or norm is None:
        return NotImplemented
    return _run(region, norm, given["input"], given.get("weight"), given.get("bias"))


def _plan_of_call(
    settings: BackwardSettings, norm: BatchNorm, input: Tensor, weight: Weight, bias: Weight
) -> NormalizedPlan | None:
    if not has_uniform_codes(settings.quantizer) or input.numel() < settings.min_numel:
        return None
    if type(norm.eps) is not float or norm.eps <= 0.0 or type(input) is not Tensor:
        return None
    if input._is_view() and (is_parameter(input._base) or input._base.numel() != input.numel()):  # type: ignore[union-attr]
        return None
    device = input.device
    for statistic in norm.running:
        if statistic is not None and not (type(statistic) is Tensor and statistic.device == device):
            return None
    for y in (weight, bias):
        if y is not None and not (type(y) is nn.Parameter and y.dtype is torch.float32 and y.device == device):
            return None
    if input.is_neg() or input.layout is not torch.strided or (weight is None and bias is not None):
        return None
    if input.dtype is not torch.float32 and (weight is None or runs_in_float32(BatchNorm.name, input)):
        return None  # its statistics may have its dtype, or autocast casts it
    return _map_plan(settings.quantizer, input.shape, input.stride(), input.dtype)


@functools.lru_cache(maxsize=4096)
def _map_plan(quantizer: Any, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> NormalizedPlan | None:
    layout = Layout.of_sizes(shape, stride, dtype)
    return plan_of_channels(quantizer, layout) if shape.numel() == layout.numel > shape[1] else None


_STORED = Stored(
    "batch, layer, group, instance and RMS norm",
    "the normalized input, packed, which has one scale across rows and channels; the inverse deviations unpacked",
    "bias Var/N of one packed copy, negligible for maps",
)
_OF_STATISTICS = "input weight bias running_mean running_var {} momentum eps cudnn_enabled"
_OF_LAYERS = "input normalized_shape weight=None bias=None eps=1e-5 cudnn_enable=True"
_OF_GROUPS = "input num_groups weight=None bias=None eps=1e-5 cudnn_enabled=True"
_PARAMETERS: dict[Callable, Parameters] = {
    torch.batch_norm: Parameters(_OF_STATISTICS.format("training")),
    torch.instance_norm: Parameters(_OF_STATISTICS.format("use_input_stats")),
    torch.layer_norm: Parameters(_OF_LAYERS),
    torch.group_norm: Parameters(_OF_GROUPS),
    torch.rms_norm: Parameters("input normalized_shape weight=None eps=None"),
    **{func: Parameters(func) for func in (F.batch_norm, F.instance_norm, F.layer_norm, F.group_norm, F.rms_norm)},
}
OPS = (
    *(
        Op(
            (getattr(F, name), getattr(torch, name)),
            functools.partial(_norm, name),
            _STORED,
            twice=name in ("batch_norm", "layer_norm", "group_norm"),
            rounds_forward=name != "rms_norm",
            is_bit_exact=False,
            is_layer=True,
            is_norm=True,
        )
        for name in ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm")
    ),
    Op(everywhere("native_layer_norm", "local_response_norm"), is_layer=True),
)
