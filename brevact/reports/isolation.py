"""Isolate the noise of one chain: it stores under the model's policy, everything else at 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from brevact.autograd import BackwardSettings, attach_region
from brevact.autograd.hooks import regions_of, takes_hooks
from brevact.injectors import BackwardQuantProxy
from brevact.injectors.proxies import names_of
from brevact.policy.rules import POLICY
from brevact.quantizers import Rounding, UniformQuantizer

#: Bits of all other layers: their variance is 1/289 of that at 4 bits.
FINE_BIT_WIDTH = 8
#: `nominal` of a mixture whose size is drawn: equals no reader's.
_OF_ONE_SIZE = object()


class Isolation:
    """Lets some layers store under the model's policy, and all others the same tensors at 8 bits.

    At 8 bits and not in full precision, so that the same tensors are packed and derived as under the policy. The caller
    restores the model (``in_place``).
    """

    def __init__(self, model: nn.Module) -> None:
        self._regions: list[tuple[Any, nn.Module, BackwardSettings | None, BackwardSettings | None]] = []
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._enter(model, None, {*names_of(model)})

    def _enter(self, module: nn.Module, around: BackwardSettings | None, left: set[nn.Module]) -> None:
        """Give each module its own region; one without inherits the settings of the region around it."""
        if module not in left or isinstance(module, BackwardQuantProxy):
            return
        left.remove(module)
        if not regions_of(module) and around is not None and takes_hooks(module):
            attach_region(module, around, POLICY)
        for hook in regions_of(module):
            self._regions.append((hook, module, hook.settings, fine(hook.settings)))
            around = hook.settings  # the last one decides
        for child in module.children():
            self._enter(child, around, left)

    def has_region(self, layer: str) -> bool:
        """Return whether the layer's region belongs to a module, and not to the model's code."""
        module = self._modules[layer]
        return any(each is module for _, each, _, _ in self._regions)

    def restrict_to(self, layers: Collection[str]) -> None:
        """Store under the policy in these layers, not in their children, and at 8 bits in all others."""
        chosen = {self._modules[layer] for layer in layers}
        for hook, module, settings, finer in self._regions:
            hook.settings = settings if module in chosen else finer


@dataclass(frozen=True, kw_only=True)
class StandIn(UniformQuantizer):
    """Stores another quantizer's tensors at 8 bits: derivations, and their bits, stay the same."""

    nominal: Any = None


@dataclass(frozen=True, kw_only=True)
class _MixtureStandIn(StandIn):
    """Replaces a mixture, which draws a quantizer for each tensor."""

    def with_drawn_size(self, numel: int, host_seed: int) -> StandIn:
        return StandIn(bit_width=self.bit_width, rounding=self.rounding, nominal=_OF_ONE_SIZE)


def _finer(quantizer: Any) -> Any:
    """Return the 8-bit replacement of a quantizer; a plain one for a module, whose tensors no cache may hold."""
    form: dict[str, Any] = {"rounding": Rounding.STOCHASTIC if quantizer.is_stochastic else Rounding.NEAREST}
    if isinstance(quantizer, nn.Module):
        return UniformQuantizer(bit_width=FINE_BIT_WIDTH, **form)
    if isinstance(quantizer, UniformQuantizer):
        form = {field.name: getattr(quantizer, field.name) for field in dataclasses.fields(quantizer) if field.init}
    kind = _MixtureStandIn if hasattr(quantizer, "with_drawn_size") else StandIn
    return kind(**(form | {"bit_width": FINE_BIT_WIDTH, "nominal": quantizer}))


def fine(settings: BackwardSettings | None) -> BackwardSettings | None:
    """Return settings that store the same tensors at 8 bits, evenly spaced; exact settings and None are unchanged.

    >>> import brevact
    >>> fine(BackwardSettings(brevact.quantizer(brevact.NearestBackward2bit))).quantizer.bit_width
    8
    """
    if settings is None:
        return None
    quantizer = settings.quantizer
    if quantizer is not None and not (settings.is_exact or settings.is_lossless or settings.keeps_elements):
        quantizer = _finer(quantizer)
    return dataclasses.replace(
        settings,
        quantizer=quantizer,
        residual_bit_width=max(FINE_BIT_WIDTH, settings.residual_bit_width),
        score_bit_width=FINE_BIT_WIDTH,
        of_functions=tuple((name, fine(each)) for name, each in settings.of_functions),
    )
