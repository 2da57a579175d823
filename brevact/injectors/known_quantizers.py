"""Brevitas quantizers whose modules are known: inside a region one call replaces some thirty of them.

Known are integers of a constant width, with zero point 0 or one of Brevitas'; behind a ReLU also a scale and a zero
point that do not depend on the activation: constant, learned, or already collected. Brevitas' own modules compute bit
width, scale and zero point, and keep their state and gradients; the quantizing ops are those of ``fake_quantization``.
Before each call the modules must be unchanged, without foreign hooks.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

import brevact.private_names.of_brevitas as bv
from brevact.private_names.of_torch import (
    DisableTorchFunction,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    has_foreign_global_hook,
    no_dispatch_modes,
)
from brevact.qat.fake_quantization import Integers, fake_quantize
from brevact.qat.forward_statistics import learned_scale, scale_of_magnitudes, weight_statistics
from brevact.qat.one_pass import Range

_DETERMINISTIC = (bv.RoundSte, bv.FloorSte, bv.CeilSte, bv.RoundToZeroSte, bv.DPURoundSte)
_CLAMPS = (bv.TensorClamp, bv.TensorClampSte, bv.InplaceTensorClampSte)
_widths: weakref.WeakKeyDictionary[UntypedStorage, tuple[Any, float]]
_widths = weakref.WeakKeyDictionary()


def integers_of(quant: Any, bit_width: Tensor) -> Integers | None:
    """Return the integers of an ``IntQuant`` or ``DecoupledIntQuant``; None if they are not fixed."""
    rounding, clamp = type(quant.float_to_int_impl), type(quant.tensor_clamp_impl)
    if rounding not in _DETERMINISTIC or clamp not in _CLAMPS or delays(quant):
        return None
    if type(quant).to_int not in (bv.IntQuant.to_int, bv.DecoupledIntQuant.to_int):  # overridden by a subclass
        return None
    if bit_width.requires_grad or bit_width.numel() != 1 or bit_width.is_meta:
        return None
    width, is_narrow = number_of(bit_width), bool(quant.narrow_range)
    if not 1 <= width <= 32 or width != int(width):
        return None
    ends = {"min_val": quant.min_int(bit_width), "max_val": quant.max_int(bit_width)}
    lowest = (-(2 ** (int(width) - 1)) + is_narrow) if quant.signed else 0
    highest = lowest + 2 ** int(width) - 1 - is_narrow
    kind = Range(int(width), lowest, highest, clamp is bv.TensorClamp, is_narrow)
    clip = functools.partial(quant.tensor_clamp_impl, **ends)
    return Integers(quant.float_to_int_impl, clip, kind if rounding is bv.RoundSte else None, lowest)


def delays(quant: Any) -> bool:
    """Return whether a quantizer starts to quantize after some steps."""
    return type(quant.delay_wrapper.delay_impl) is not bv._NoDelay


def number_of(x: Tensor) -> float:
    """A constant's value, read only once on a GPU, where reading waits."""
    if x.is_cpu:  # `x.data` is set without a new version
        return float(x.item())
    storage, place = x.untyped_storage(), (x._version, x.storage_offset(), x.dtype)
    known = _widths.get(storage)
    if known is None or known[0] != place:
        known = _widths[storage] = place, float(x.item())
    return known[1]


#: Statistics that are recomputed, without a state of their own.
WEIGHT_STATISTICS = (
    bv.AbsAve,
    bv.AbsMax,
    bv.AbsMaxAve,
    bv.AbsMaxL2,
    bv.AbsMinMax,
    bv.AbsPercentile,
    bv.MeanSigmaStd,
    bv.NegativeMinOrZero,
    bv.NegativePercentileOrZero,
    bv.PercentileInterval,
    bv.SignedAbsMax,
)
_MAGNITUDES = (bv.AbsAve, bv.AbsMax, bv.AbsMaxAve, bv.AbsMaxL2, bv.AbsPercentile)
_ZERO_POINTS = (
    bv.ZeroZeroPoint,
    bv.ParameterZeroPoint,
    bv.ParameterFromRuntimeZeroPoint,
    bv.ParameterFromStatsFromParameterZeroPoint,
    bv.StatsFromParameterZeroPoint,
)
_EVERYWHERE = global_forward_pre_hooks, global_forward_hooks, global_backward_pre_hooks, global_backward_hooks


_hooks_in = operator.itemgetter("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_children_in = operator.itemgetter("_modules")


class Tree(NamedTuple):
    """A module and all modules inside, depth first: the attributes of each, its number of children, all children."""

    attributes: tuple[dict[str, Any], ...]
    counts: tuple[int, ...]
    children: tuple[nn.Module | None, ...]

    @staticmethod
    def of(module: nn.Module) -> Tree:
        modules = (module, *(each for child in module.children() for each in child.modules()))
        children = tuple(tuple(each._modules.values()) for each in modules)
        return Tree(
            tuple(each.__dict__ for each in modules), tuple(map(len, children)), tuple(itertools.chain(*children))
        )

    def is_untouched(self) -> bool:
        """Return whether the modules are still those that were read, without own forwards or hooks."""
        attributes = self.attributes
        if any(itertools.chain.from_iterable(map(_hooks_in, attributes))):
            return False
        modules = tuple(map(_children_in, attributes))
        if tuple(map(len, modules)) != self.counts:
            return False
        if tuple(itertools.chain.from_iterable(map(dict.values, modules))) != self.children:
            return False
        if any(map(dict.__contains__, attributes, itertools.repeat("forward"))):
            return False
        return not any(_EVERYWHERE) or not has_foreign_global_hook()


class _Learned(NamedTuple):
    """The modules of a learned scale and of its smallest magnitude; ``learned_scale`` does their ops."""

    scaling: Any
    clamp: Any

    @staticmethod
    def of(scaling: Any) -> _Learned | None:
        if type(scaling) is bv.ParameterFromRuntimeStatsScaling:
            clamp = scaling.clamp_scaling.clamp_min_ste
            parts = scaling.restrict_scaling, scaling.restrict_threshold, scaling.restrict_scale_threshold
        elif type(scaling) is bv.ParameterScaling:
            clamp = scaling.restrict_clamp_scaling.clamp_ste
            threshold, ratio = scaling.restrict_clamp_threshold, scaling.restrict_clamp_scale_threshold
            if not type(threshold.clamp_ste) is type(ratio.clamp_ste) is bv.Identity:
                return None
            parts = scaling.restrict_clamp_scaling, threshold, ratio
        else:
            return None
        restricts = tuple(type(part.restrict_value_impl) for part in parts)
        if restricts != (bv.FloatRestrictValue, bv.FloatRestrictValue, bv.Identity):
            return None
        if type(scaling.restrict_threshold_pre) is not bv.Abs:
            return None
        if type(clamp) is bv.Identity:
            return _Learned(scaling, None)
        return _Learned(scaling, clamp) if type(clamp) is bv.ScalarSignedClampMinSte else None

    def scale(self, threshold: Tensor) -> Tensor | None:
        """Return the scale; None if it is not learned yet, or computed otherwise."""
        scaling = self.scaling
        if type(scaling) is bv.ParameterFromRuntimeStatsScaling:
            if not scaling.training or _collects(scaling):
                return None
            if scaling.counter == scaling.collect_stats_steps:
                scaling.init_scale()  # now, as checkpoints run the forward pass again: both save as many tensors
        value = scaling._parameters.get("value")  # `__getattr__` of modules takes as long as the scale
        if value is None or threshold.dim() or threshold.requires_grad or value.dtype is not threshold.dtype:
            return None
        return learned_scale(value, threshold, None if self.clamp is None else self.clamp.min_val)


class _OfStatistics(NamedTuple):
    """The modules that clamp magnitudes between a weight's statistics and its scale; the others change none."""

    clamps: tuple[Any, ...]
    are_magnitudes: bool

    @staticmethod
    def of(scaling: Any) -> _OfStatistics | None:
        if type(scaling) is not bv.StatsFromParameterScaling:
            return None
        impl = scaling.stats_scaling_impl
        of_scaling, of_threshold = impl.restrict_clamp_scaling, impl.restrict_clamp_threshold
        of_ratio = impl.restrict_clamp_scale_threshold
        restricts = of_scaling.restrict_value_impl, of_threshold.restrict_value_impl
        before = impl.restrict_scaling_pre, impl.restrict_threshold_pre
        others = impl.affine_rescaling, of_ratio.restrict_value_impl, of_ratio.clamp_ste, of_threshold.clamp_ste
        clamps = impl.clamp_scaling.clamp_min_ste, of_scaling.clamp_ste
        for modules, kinds in (
            (restricts, (bv.FloatRestrictValue,)),
            (before, (bv.Abs,)),
            (others, (bv.Identity,)),
            (clamps, (bv.Identity, bv.ScalarSignedClampMinSte)),
        ):
            if any(type(module) not in kinds for module in modules):
                return None
        are_magnitudes = type(scaling.parameter_list_stats.stats.stats_impl) in _MAGNITUDES
        return _OfStatistics(tuple(clamp for clamp in clamps if type(clamp) is not bv.Identity), are_magnitudes)

    def scale(self, stats: Tensor, threshold: Tensor) -> Tensor | None:
        """Return the scale of magnitudes, or of statistics above all bounds, with its gradient; None for others."""
        if type(stats) is not Tensor or not stats.numel() or threshold.dim() or threshold.requires_grad:
            return None
        least = max((clamp.min_val for clamp in self.clamps), default=0.0)
        if stats.is_cpu:
            smallest = stats.detach().amin().item() if stats.dim() else stats.item()  # NaN if there is one
            return stats / threshold if smallest > least else None
        if not self.are_magnitudes or stats.dtype is not threshold.dtype or least < 0.0:
            return None
        return scale_of_magnitudes(stats, threshold, least)


class KnownQuantizer:
    """A known fused activation or stand-alone quantizer, and the values computed for its bit width."""

    def __init__(self, module: Any) -> None:
        self.tree = Tree.of(module)
        is_fused = type(module) is bv.FusedActivationQuantProxy
        quant: Any = module.tensor_quant if is_fused else module
        self._quant: Any = weakref.ref(quant)  # `_known` must not keep quantizers and their weights alive
        self.rectifies = is_fused and type(module.activation_impl) is nn.ReLU
        self.is_known = _is_known(quant) and (not is_fused or _is_known_before(module.activation_impl, quant))
        self.reads_weight = self.is_known and _reads_weight(quant.scaling_impl)
        self.scaling: Any = quant.scaling_impl if self.is_known else None
        self.zero_point: Any = quant.zero_point_impl if self.is_known else None
        self._bit_width: Any = _buffer_of(quant.msb_clamp_bit_width_impl, "bit_width") if self.is_known else None
        is_zero = type(self.zero_point) is bv.ZeroZeroPoint
        self._zero: Any = _buffer_of(quant.zero_point_impl, "zero_point") if is_zero else None
        self.learned = _Learned.of(self.scaling) if self.is_known else None
        self.of_statistics = _OfStatistics.of(self.scaling) if self.is_known else None
        self._width: tuple[Any, Tensor, Integers | None] | None = None

    def quantize(self, region: Any, x: Tensor, *, reads_elements: bool) -> Any:
        """Return the modules' results: values, scale, zero point, bit width; NotImplemented for other modules."""
        quant = self._quant()
        if quant.observer_only or not self.tree.is_untouched():
            return NotImplemented
        with region.hooks.suspended, DisableTorchFunction():
            module, name = self._bit_width
            bit_width = module._buffers[name]
            bit_width = bit_width if name == "bit_width" else bit_width.detach()
            threshold, integers = self._of_width(bit_width)
            if integers is None:
                return NotImplemented
            zero_point = None if self._zero is None else self._zero[0]._buffers["value"].detach()
            scale = None if self.learned is None else self.learned.scale(threshold)
            if scale is None and (not reads_elements or is_independent(self.scaling)):
                scale = self.scaling(x, threshold)
        if scale is None:
            scale = self._scale_of(region, x, threshold)
        if zero_point is None:
            zero_point = self._zero_point_of(region, x, scale, bit_width)
        zero_is_lowest = self._zero is not None and integers.lowest == 0
        given = scale, zero_point, scale, zero_point
        out = fake_quantize(region, integers, x, *given, rectifies=self.rectifies, zero_is_lowest=zero_is_lowest)
        if out is NotImplemented and x.numel() < region.settings.min_numel:  # small tensors stay unpacked
            with region.hooks.suspended, DisableTorchFunction():
                out = quant.int_quant(scale, zero_point, bit_width, x.relu() if self.rectifies else x)
            region.mark(out, is_weight=region.is_weight(x))
        elif out is NotImplemented:
            out = quant.int_quant(scale, zero_point, bit_width, x.relu() if self.rectifies else x)
        return out, scale, zero_point, bit_width

    def _scale_of(self, region: Any, x: Tensor, threshold: Tensor) -> Tensor:
        """Return a scale that is computed from ``x``: from a weight's statistics, which backward recomputes."""
        scaling = self.scaling
        if not self.reads_weight or not region.is_weight(x):
            return scaling(x, threshold)
        parts = scaling.parameter_list_stats
        if parts.extra_tracked_params_list is not None:
            return self._scale_of_several(region, threshold)
        with region.hooks.suspended, DisableTorchFunction():
            values = parts.first_tracked_param(x)
            is_small = values.numel() < region.settings.min_numel or not values.requires_grad
            stats = parts.stats.stats_impl(values) if is_small else None
        if stats is None:
            stats = weight_statistics(region, parts.stats.stats_impl, values)
        return self._scale_of_statistics(region, stats, threshold)

    def _scale_of_several(self, region: Any, threshold: Tensor) -> Tensor:
        """Return a scale from the joint statistics of several weights, such as those of an LSTM's gates."""
        parts = self.scaling.parameter_list_stats
        first, others = parts.first_tracked_param, tuple(parts.extra_tracked_params_list)
        impl = parts.stats.stats_impl

        def compute(weight: Tensor, *weights: Tensor) -> Tensor:
            values = first.view_shape_impl(weight)
            for other, each in zip(others, weights, strict=True):
                values = torch.cat([other.view_shape_impl(each), values], dim=other.cat_dim)
            return impl(values)

        weights = first.parameter, *(other.parameter for other in others)
        return self._scale_of_statistics(region, weight_statistics(region, compute, *weights), threshold)

    def _scale_of_statistics(self, region: Any, stats: Tensor, threshold: Tensor) -> Tensor:
        parts = self.scaling.parameter_list_stats.stats
        with region.hooks.suspended, DisableTorchFunction():
            stats = stats.view(parts.stats_output_shape)
            found: Tensor | None = None if self.of_statistics is None else self.of_statistics.scale(stats, threshold)
            return self.scaling.stats_scaling_impl(stats, threshold) if found is None else found

    def _zero_point_of(self, region: Any, x: Tensor, scale: Tensor, bit_width: Tensor) -> Tensor:
        module = self.zero_point
        if not is_own(module):
            return module(x, scale, bit_width)
        with region.hooks.suspended, DisableTorchFunction():
            found = module(x, scale, bit_width)
        return found

    def _of_width(self, bit_width: Tensor) -> tuple[Tensor, Integers | None]:
        """Return threshold and integers of a bit width, which is a buffer of the module; by its value."""
        with no_dispatch_modes():  # a selective checkpoint counts ops, and would miss these when it recomputes
            value = None if bit_width.is_meta else number_of(bit_width)
            key = value, bit_width.dtype, bit_width.device
            if self._width is None or self._width[0] != key:
                integers = integers_of(self._quant().int_quant, bit_width)
                self._width = key, self._quant().int_scaling_impl(bit_width), integers
        _, threshold, integers = self._width
        return threshold, integers


_known: weakref.WeakKeyDictionary[nn.Module, KnownQuantizer] = weakref.WeakKeyDictionary()


def known_quantizer(module: nn.Module) -> KnownQuantizer | None:
    """Return the record of a fused activation or a quantizer; None if its modules are not known."""
    found = _known.get(module)
    if found is None or tuple(module._modules.values()) != found.tree.children[: found.tree.counts[0]]:
        found = _known[module] = KnownQuantizer(module)
    return found if found.is_known else None


def _buffer_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module with a constant as a buffer, and the buffer's name: this module, or its child of that name."""
    child = module._modules.get(name)
    return (module, name) if child is None else (child, "value")


def _collects(part: Any) -> bool:
    """Whether a scale or zero point of runtime statistics is still computed from activations."""
    return bool(part.training and part.counter < part.collect_stats_steps)


def takes_statistics(scaling: Any) -> bool:
    """Return whether a scale is computed from the activation."""
    return type(scaling) is bv.ParameterFromRuntimeStatsScaling and _collects(scaling)


def is_independent(scaling: Any) -> bool:
    """Return whether a scale depends on no activation or weight: constant, learned, or already collected."""
    return type(scaling) in (bv.ConstScaling, bv.ParameterScaling) or (
        type(scaling) is bv.ParameterFromRuntimeStatsScaling and not takes_statistics(scaling)
    )


def is_own(zero_point: Any) -> bool:
    """Return whether a zero point depends on no activation or weight: 0, learned, or already collected."""
    if type(zero_point) is bv.ParameterFromRuntimeZeroPoint:
        return not _collects(zero_point)
    return type(zero_point) in (bv.ZeroZeroPoint, bv.ParameterZeroPoint)


def _is_known_before(relu: nn.Module, quant: bv.RescalingIntQuant) -> bool:
    """Whether an activation before a known quantizer, whose scale does not read elements, is known."""
    if type(quant.scaling_impl) not in (bv.ConstScaling, bv.ParameterScaling, bv.ParameterFromRuntimeStatsScaling):
        return False
    if type(relu) is not nn.ReLU:
        return type(relu) is nn.Identity
    return not relu.inplace and type(quant.int_quant.tensor_clamp_impl) is bv.TensorClamp  # one mask for both


def _reads_weight(scaling: Any) -> bool:
    """Whether a scale comes from known statistics of one weight, or of several in a row."""
    if type(scaling) is not bv.StatsFromParameterScaling:
        return False
    parts = scaling.parameter_list_stats
    if type(parts.stats.stats_impl) not in WEIGHT_STATISTICS:
        return False
    others = parts.extra_tracked_params_list
    if others is None:
        return True
    first = parts.first_tracked_param
    if type(first) is not bv._ViewParameterWrapper or any(
        type(other) is not bv._ViewCatParameterWrapper for other in others
    ):
        return False
    views = (type(each.view_shape_impl).__module__ for each in (first, *others))
    return all(each.startswith("brevitas.core.function_wrapper.") for each in views)  # arrange elements alone


def _is_known(quant: Any) -> bool:
    if type(quant) is not bv.RescalingIntQuant or type(quant.int_quant) is not bv.IntQuant or delays(quant.int_quant):
        return False
    return (
        type(quant.int_quant.input_view_impl) is bv.Identity
        and type(quant.zero_point_impl) in _ZERO_POINTS
        and type(quant.int_scaling_impl) in (bv.IntScaling, bv.PowerOfTwoIntScaling)
        and type(quant.msb_clamp_bit_width_impl) in (bv.BitWidthConst, bv.BitWidthStatefulConst)
    )
