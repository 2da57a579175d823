"""Activation quantizers of Brevitas whose modules are known: inside a region one call stands for some thirty of them.

Known are integers of a constant width, rounded deterministically, with the zero point 0 and a scale that does not
depend on the activation: constant, learned, or collected already. Bit width and scale are asked of Brevitas' own
modules, whose state and gradients so stay theirs; the ops that quantize are those of ``fake_quantization``. Before each
call the modules must be those that were read, with nobody's hooks on them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor, nn

from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.ops.fake_quantization import Integers, Rectifier, fake_quantize
from brevact.injectors.integer_kinds import delays, integers_of
from brevact.private_names.of_brevitas import (
    BitWidthConst,
    BitWidthStatefulConst,
    ConstScaling,
    FusedActivationQuantProxy,
    Identity,
    IntQuant,
    IntScaling,
    ParameterFromRuntimeStatsScaling,
    ParameterScaling,
    PowerOfTwoIntScaling,
    RescalingIntQuant,
    ZeroZeroPoint,
)
from brevact.private_names.of_torch import (
    DisableTorchFunction,
    global_backward_hooks,
    global_backward_pre_hooks,
    global_forward_hooks,
    global_forward_pre_hooks,
)

_EVERYWHERE = global_forward_pre_hooks, global_forward_hooks, global_backward_pre_hooks, global_backward_hooks


class Tree(NamedTuple):
    """The modules below one, depth first, and the children of each."""

    modules: tuple[nn.Module, ...]
    children: tuple[tuple[nn.Module | None, ...], ...]

    @staticmethod
    def of(module: nn.Module) -> Tree:
        """Read the modules below one."""
        modules = tuple(each for child in module.children() for each in child.modules())
        return Tree((module, *modules), tuple(tuple(each._modules.values()) for each in (module, *modules)))

    def is_untouched(self) -> bool:
        """Return whether the modules are those that were read, and run as their classes say, seen by no hooks."""
        for module, children in zip(self.modules, self.children, strict=True):
            own = module.__dict__
            if (
                own["_forward_pre_hooks"]
                or own["_forward_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or "forward" in own
                or tuple(own["_modules"].values()) != children
            ):
                return False
        return not any(_EVERYWHERE) or are_own(_EVERYWHERE)


def are_own(hooks: tuple[Any, ...]) -> bool:
    """Return whether hooks on all modules are this package's."""
    return all(getattr(hook, "__module__", "").startswith("brevact.") for each in hooks for hook in each.values())


class KnownQuantizer:
    """A fused activation that is known, and what was computed for its bit width."""

    def __init__(self, fused: FusedActivationQuantProxy) -> None:
        self.tree = Tree.of(fused)
        self.is_known = _is_known(fused)
        self.rectifies = type(fused.activation_impl) is nn.ReLU
        self._width: tuple[Tensor, int, Tensor, Integers | None] | None = None

    def quantize(self, region: EagerKeeper, fused: FusedActivationQuantProxy, x: Tensor) -> Any:
        """Return what the fused activation returns: values, scale, zero point, bit width; NotImplemented if unknown."""
        quant = fused.tensor_quant
        if quant.observer_only or takes_statistics(quant.scaling_impl) or not self.tree.is_untouched():
            return NotImplemented
        with region.hooks.suspended, DisableTorchFunction():
            bit_width = quant.msb_clamp_bit_width_impl()
            threshold, integers = self._of_width(quant, bit_width)
            if integers is None:
                return NotImplemented
            scale = quant.scaling_impl(x, threshold)
            zero_point = quant.zero_point_impl(x, scale, bit_width)
        rectifier = Rectifier(None) if self.rectifies else None
        out = fake_quantize(region, integers, x, scale, zero_point, scale, zero_point, rectifier)
        if out is NotImplemented:
            values = fused.activation_impl(x)
            out = quant.int_quant(scale, zero_point, bit_width, values)
        return out, scale, zero_point, bit_width

    def _of_width(self, quant: RescalingIntQuant, bit_width: Tensor) -> tuple[Tensor, Integers | None]:
        """Return the threshold and the integers of a bit width, which a buffer of the module holds."""
        known = self._width
        if known is None or known[0].data_ptr() != bit_width.data_ptr() or known[1] != bit_width._version:
            threshold = quant.int_scaling_impl(bit_width)
            known = self._width = bit_width, bit_width._version, threshold, integers_of(quant.int_quant, bit_width)
        return known[2], known[3]


_known: weakref.WeakKeyDictionary[nn.Module, KnownQuantizer] = weakref.WeakKeyDictionary()


def known_quantizer(fused: FusedActivationQuantProxy) -> KnownQuantizer | None:
    """Return what is known of a fused activation; None where its modules are others than the known ones."""
    found = _known.get(fused)
    if found is None or not _is_same(found, fused):
        found = _known[fused] = KnownQuantizer(fused)
    return found if found.is_known else None


def _is_same(found: KnownQuantizer, fused: FusedActivationQuantProxy) -> bool:
    """Whether the modules in front are those that were read; ``Tree.is_untouched`` compares all of them."""
    return tuple(fused._modules.values()) == found.tree.children[0]


def takes_statistics(scaling: Any) -> bool:
    """Return whether a scale is computed from the activation."""
    if type(scaling) is not ParameterFromRuntimeStatsScaling:
        return False
    return bool(scaling.training and scaling.counter < scaling.collect_stats_steps)


def _is_known(fused: FusedActivationQuantProxy) -> bool:
    relu, quant = fused.activation_impl, fused.tensor_quant
    if type(relu) is nn.ReLU:
        if relu.inplace:
            return False
    elif type(relu) is not nn.Identity:
        return False
    if type(quant) is not RescalingIntQuant or type(quant.int_quant) is not IntQuant or delays(quant.int_quant):
        return False
    return (
        type(quant.int_quant.input_view_impl) is Identity
        and type(quant.zero_point_impl) is ZeroZeroPoint
        and type(quant.scaling_impl) in (ConstScaling, ParameterScaling, ParameterFromRuntimeStatsScaling)
        and type(quant.int_scaling_impl) in (IntScaling, PowerOfTwoIntScaling)
        and type(quant.msb_clamp_bit_width_impl) in (BitWidthConst, BitWidthStatefulConst)
    )
