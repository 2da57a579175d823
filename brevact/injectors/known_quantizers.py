"""Quantizers of Brevitas whose modules are known: inside a region one call stands for some thirty of them.

Known are integers of a constant width, with the zero point 0 or one of Brevitas'; behind a ReLU also a scale and a zero
point that do not depend on the activation: constant, learned, or collected already. Bit width, scale and zero point are
asked of Brevitas' own modules, whose state and gradients so stay theirs; the ops that quantize are those of
``fake_quantization``. Before each call the modules must be those that were read, with nobody's hooks on them.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brevact.autograd.ops.fake_quantization import Integers, Rectifier, fake_quantize
from brevact.autograd.ops.forward_statistics import largest_magnitude, weight_statistics
from brevact.autograd.ops.learned_scale import learned_scale
from brevact.injectors.integer_kinds import delays, integers_of
from brevact.private_names.of_brevitas import (
    Abs,
    AbsAve,
    AbsMax,
    AbsMaxAve,
    AbsMaxL2,
    AbsMinMax,
    AbsPercentile,
    BitWidthConst,
    BitWidthStatefulConst,
    ConstScaling,
    FloatRestrictValue,
    FusedActivationQuantProxy,
    Identity,
    IntQuant,
    IntScaling,
    MeanSigmaStd,
    NegativeMinOrZero,
    NegativePercentileOrZero,
    ParameterFromRuntimeStatsScaling,
    ParameterFromRuntimeZeroPoint,
    ParameterFromStatsFromParameterZeroPoint,
    ParameterScaling,
    ParameterZeroPoint,
    PercentileInterval,
    PowerOfTwoIntScaling,
    RescalingIntQuant,
    ScalarSignedClampMinSte,
    SignedAbsMax,
    StatsFromParameterScaling,
    StatsFromParameterZeroPoint,
    TensorClamp,
    ZeroZeroPoint,
)
from brevact.private_names.of_torch import (
    DisableTorchFunction,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
    no_dispatch_modes,
)

#: Statistics that are computed again, without a state of their own.
STATISTICS_OF_WEIGHTS = (
    AbsAve,
    AbsMax,
    AbsMaxAve,
    AbsMaxL2,
    AbsMinMax,
    AbsPercentile,
    MeanSigmaStd,
    NegativeMinOrZero,
    NegativePercentileOrZero,
    PercentileInterval,
    SignedAbsMax,
)
_ZERO_POINTS = (
    ZeroZeroPoint,
    ParameterZeroPoint,
    ParameterFromRuntimeZeroPoint,
    ParameterFromStatsFromParameterZeroPoint,
    StatsFromParameterZeroPoint,
)
_EVERYWHERE = global_forward_pre_hooks, global_forward_hooks, global_backward_pre_hooks, global_backward_hooks


def statistics_of_weight(region: Any, impl: Any, weight: Tensor) -> Tensor:
    """Return statistics of a weight, whose gradient computes them again, or goes to the largest elements."""
    if type(impl) is AbsMax and weight.dim() and not weight.is_meta:  # without elements none is the largest
        return largest_magnitude(region, weight, impl.stats_reduce_dim, impl.keepdim)
    return weight_statistics(region, impl, weight)


_hooks_in = operator.itemgetter("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_children_in = operator.itemgetter("_modules")


class Tree(NamedTuple):
    """The modules below one, depth first: the attributes of each, how many children it has, and all of these."""

    attributes: tuple[dict[str, Any], ...]
    counts: tuple[int, ...]
    children: tuple[nn.Module | None, ...]

    @staticmethod
    def of(module: nn.Module) -> Tree:
        """Read the modules below one."""
        modules = (module, *(each for child in module.children() for each in child.modules()))
        children = tuple(tuple(each._modules.values()) for each in modules)
        return Tree(
            tuple(each.__dict__ for each in modules), tuple(map(len, children)), tuple(itertools.chain(*children))
        )

    def is_untouched(self) -> bool:
        """Return whether the modules are those that were read, and run as their classes say, seen by no hooks.

        This is asked in every call: the loops are those of C.
        """
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
        return not any(_EVERYWHERE) or are_own(_EVERYWHERE)


def are_own(hooks: tuple[Any, ...]) -> bool:
    """Return whether hooks on all modules are this package's."""
    return all(getattr(hook, "__module__", "").startswith("brevact.") for each in hooks for hook in each.values())


class _Learned(NamedTuple):
    """The modules of a learned scale, whose ops are those of ``learned_scale``, and of its smallest magnitude."""

    scaling: Any
    clamp: Any

    @staticmethod
    def of(scaling: Any) -> _Learned | None:
        """Read the modules; None for others."""
        if type(scaling) is ParameterFromRuntimeStatsScaling:
            clamp = scaling.clamp_scaling.clamp_min_ste
            parts = scaling.restrict_scaling, scaling.restrict_threshold, scaling.restrict_scale_threshold
        elif type(scaling) is ParameterScaling:
            clamp = scaling.restrict_clamp_scaling.clamp_ste
            threshold, ratio = scaling.restrict_clamp_threshold, scaling.restrict_clamp_scale_threshold
            if not type(threshold.clamp_ste) is type(ratio.clamp_ste) is Identity:
                return None
            parts = scaling.restrict_clamp_scaling, threshold, ratio
        else:
            return None
        restricts = tuple(type(part.restrict_value_impl) for part in parts)
        if restricts != (FloatRestrictValue, FloatRestrictValue, Identity):
            return None
        if type(scaling.restrict_threshold_pre) is not Abs:
            return None
        if type(clamp) is Identity:
            return _Learned(scaling, None)
        return _Learned(scaling, clamp) if type(clamp) is ScalarSignedClampMinSte else None

    def scale(self, threshold: Tensor) -> Tensor | None:
        """Return the scale; None where it is not learned yet, or computed otherwise."""
        scaling = self.scaling
        if type(scaling) is ParameterFromRuntimeStatsScaling and (
            not scaling.training or scaling.counter <= scaling.collect_stats_steps
        ):
            return None
        value = scaling.value
        if threshold.dim() or threshold.requires_grad or value.dtype is not threshold.dtype:
            return None
        return learned_scale(value, threshold, None if self.clamp is None else self.clamp.min_val)


class KnownQuantizer:
    """A fused activation, or a quantizer by itself, that is known, and what was computed for its bit width."""

    def __init__(self, module: Any) -> None:
        self.tree = Tree.of(module)
        is_fused = type(module) is FusedActivationQuantProxy
        quant: Any = module.tensor_quant if is_fused else module
        self._quant = weakref.ref(quant)  # the table of all that are known must not keep them, and their weights, alive
        self.rectifies = is_fused and type(module.activation_impl) is nn.ReLU
        self.is_known = _is_known(quant) and (not is_fused or _is_known_before(module.activation_impl, quant))
        self.reads_weight = self.is_known and _reads_weight(quant.scaling_impl)
        self.scaling: Any = quant.scaling_impl if self.is_known else None
        self.zero_point: Any = quant.zero_point_impl if self.is_known else None
        self._bit_width: Any = quant.msb_clamp_bit_width_impl if self.is_known else None
        self.learned = _Learned.of(self.scaling) if self.is_known else None
        self._width: _Width | None = None

    @property
    def quant(self) -> Any:
        """The quantizer, which whoever asks for it holds."""
        return self._quant()

    def quantize(self, region: Any, x: Tensor, *, reads_elements: bool) -> Any:
        """Return what the modules return: values, scale, zero point, bit width; NotImplemented for others.

        A scale for which the modules of a quantizer by itself read elements of ``x`` is computed in the region.
        """
        quant = self.quant
        if quant.observer_only or not self.tree.is_untouched():
            return NotImplemented
        with region.hooks.suspended, DisableTorchFunction():
            width = self._bit_width.bit_width
            bit_width = width if isinstance(width, Tensor) else width.value.detach()
            threshold, integers = self._of_width(bit_width)
            if integers is None:
                return NotImplemented
            is_zero = type(self.zero_point) is ZeroZeroPoint
            zero_point = self.zero_point.zero_point.value.detach() if is_zero else None
            scale = None if self.learned is None else self.learned.scale(threshold)
            if scale is None and (not reads_elements or is_independent(self.scaling)):
                scale = self.scaling(x, threshold)
        if scale is None:
            scale = self._scale_of(region, x, threshold)
        if zero_point is None:
            zero_point = self._zero_point_of(region, x, scale, bit_width)
        rectifier = Rectifier(None) if self.rectifies else None
        out = fake_quantize(region, integers, x, scale, zero_point, scale, zero_point, rectifier)
        if out is NotImplemented and x.numel() < region.settings.min_numel:  # autograd keeps small tensors as they are
            with region.hooks.suspended, DisableTorchFunction():
                out = quant.int_quant(scale, zero_point, bit_width, x.relu() if self.rectifies else x)
            region.mark(out, is_weight=region.is_weight(x))
        elif out is NotImplemented:
            out = quant.int_quant(scale, zero_point, bit_width, x.relu() if self.rectifies else x)
        return out, scale, zero_point, bit_width

    def _scale_of(self, region: Any, x: Tensor, threshold: Tensor) -> Tensor:
        """Return a scale that is computed of ``x``: of statistics of a weight, which backward computes again."""
        scaling = self.scaling
        if not self.reads_weight or not region.is_weight(x):
            found: Tensor = scaling(x, threshold)
            return found
        parts = scaling.parameter_list_stats
        with region.hooks.suspended, DisableTorchFunction():
            values = parts.first_tracked_param(x)
            is_small = values.numel() < region.settings.min_numel or not values.requires_grad
            stats = parts.stats.stats_impl(values) if is_small else None
        if stats is None:
            stats = statistics_of_weight(region, parts.stats.stats_impl, values)
        with region.hooks.suspended, DisableTorchFunction():
            found = scaling.stats_scaling_impl(stats.view(parts.stats.stats_output_shape), threshold)
        return found

    def _zero_point_of(self, region: Any, x: Tensor, scale: Tensor, bit_width: Tensor) -> Tensor:
        """Return a zero point that learns, or one of statistics, which are those of ``x`` in the region."""
        module = self.zero_point
        if not is_own(module):
            found: Tensor = module(x, scale, bit_width)
            return found
        with region.hooks.suspended, DisableTorchFunction():
            found = module(x, scale, bit_width)
        return found

    def _of_width(self, bit_width: Tensor) -> tuple[Tensor, Integers | None]:
        """Return the threshold and the integers of a bit width, which a buffer of the module holds."""
        known = self._width
        if known is None or not known.is_of(bit_width):
            with no_dispatch_modes():  # a selective checkpoint counts ops, and would miss these when it computes again
                threshold = self.quant.int_scaling_impl(bit_width)
                integers = integers_of(self.quant.int_quant, bit_width)
                # what `bit_width.data` is set to leaves the version alone, and shows in the memory that NumPy reads
                bits = bit_width.detach()
                bits = bits.view(torch.int16) if bits.dtype is torch.bfloat16 else bits  # which NumPy does not know
                view = bits.numpy() if bits.is_cpu else None
            value = None if view is None else float(view)
            address, version = bit_width.data_ptr(), bit_width._version
            known = self._width = _Width(bit_width, address, version, view, value, threshold, integers)
        return known.threshold, known.integers


class _Width(NamedTuple):
    """A bit width, its version, its value (or its bits) where the host can read it, and what was computed for them.

    The tensor keeps others from its address. ``share_memory`` moves it, and frees the memory that the view shows.
    """

    bit_width: Tensor
    address: int
    version: int
    view: Any
    value: float | None
    threshold: Tensor
    integers: Integers | None

    def is_of(self, bit_width: Tensor) -> bool:
        """Return whether this is the same tensor, and has not changed."""
        if self.address != bit_width.data_ptr() or self.version != bit_width._version:
            return False
        return self.view is None or float(self.view) == self.value


_known: weakref.WeakKeyDictionary[nn.Module, KnownQuantizer] = weakref.WeakKeyDictionary()


def known_quantizer(module: nn.Module) -> KnownQuantizer | None:
    """Return what is known of a fused activation or a quantizer; None where its modules are others."""
    found = _known.get(module)
    if found is None or tuple(module._modules.values()) != found.tree.children[: found.tree.counts[0]]:
        found = _known[module] = KnownQuantizer(module)
    return found if found.is_known else None


def takes_statistics(scaling: Any) -> bool:
    """Return whether a scale is computed from the activation."""
    if type(scaling) is not ParameterFromRuntimeStatsScaling:
        return False
    return bool(scaling.training and scaling.counter < scaling.collect_stats_steps)


def is_independent(scaling: Any) -> bool:
    """Return whether a scale depends on no activation or weight: constant, learned, or collected already."""
    return type(scaling) in (ConstScaling, ParameterScaling) or (
        type(scaling) is ParameterFromRuntimeStatsScaling and not takes_statistics(scaling)
    )


def is_own(zero_point: Any) -> bool:
    """Return whether a zero point depends on no activation or weight: 0, learned, or collected already."""
    if type(zero_point) is ParameterFromRuntimeZeroPoint:
        return not (zero_point.training and zero_point.counter < zero_point.collect_stats_steps)
    return type(zero_point) in (ZeroZeroPoint, ParameterZeroPoint)


def _is_known_before(relu: nn.Module, quant: RescalingIntQuant) -> bool:
    """Whether an activation in front of a known quantizer, whose scale does not read elements, is known."""
    if type(quant.scaling_impl) not in (ConstScaling, ParameterScaling, ParameterFromRuntimeStatsScaling):
        return False
    if type(relu) is not nn.ReLU:
        return type(relu) is nn.Identity
    return not relu.inplace and type(quant.int_quant.tensor_clamp_impl) is TensorClamp  # whose mask serves both


def _reads_weight(scaling: Any) -> bool:
    """Whether a scale comes from known statistics of one weight."""
    if type(scaling) is not StatsFromParameterScaling:
        return False
    parts = scaling.parameter_list_stats
    return parts.extra_tracked_params_list is None and type(parts.stats.stats_impl) in STATISTICS_OF_WEIGHTS


def _is_known(quant: Any) -> bool:
    if type(quant) is not RescalingIntQuant or type(quant.int_quant) is not IntQuant or delays(quant.int_quant):
        return False
    return (
        type(quant.int_quant.input_view_impl) is Identity
        and type(quant.zero_point_impl) in _ZERO_POINTS
        and type(quant.int_scaling_impl) in (IntScaling, PowerOfTwoIntScaling)
        and type(quant.msb_clamp_bit_width_impl) in (BitWidthConst, BitWidthStatefulConst)
    )
