"""The ``act_quant=`` slot of every ``brevact.nn`` layer, in addition to its base class's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from brevact.injectors import BackwardQuantProxy, BackwardQuantSolver
from brevact.injectors.injector_type import BackwardInjectorType, derived, known_names
from brevact.injectors.resolve import BackwardQuantizer
from brevact.injectors.stock_layers import ACT_PREFIX, check_keywords, fill_slot, pop_settings


class BackwardSlot:
    """Gives a layer class the keyword ``act_quant`` and, with the prefix ``act_``, the quantizer's settings.

    List it first: ``class ReLU(BackwardSlot, torch.nn.ReLU)``. The layer's whole forward then runs in a region with
    that quantizer while the layer trains; forward, parameters and ``state_dict`` keys stay the base class's.

    ``act_quant`` is a backward injector class, an activation quantizer, another layer's ``act_quant`` (to share its
    settings), or None for a plain layer, which ignores ``act_`` settings, as Brevitas does, but raises for a name that
    is a setting of no backward quantizer.
    """

    act_quant: BackwardQuantProxy | None
    if TYPE_CHECKING:  # the keyword added to the base class's arguments

        def __init__(self, *args: Any, act_quant: BackwardQuantizer | None = None, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if BackwardSlot in cls.__bases__:
            base: Any = cls.__bases__[cls.__bases__.index(BackwardSlot) + 1]
            if not cls.__dict__.get("__doc__"):
                cls.__doc__ = f"``{base.__module__}.{base.__name__}`` with a backward quantizer (``act_quant=``)."
            initialize = cls.__dict__.get("__init__", base.__init__)
            cls.__init__ = _with_slot(cls, initialize)  # type: ignore[method-assign]


def layers_in(names: Mapping[str, Any]) -> list[str]:
    kinds = {name: kind for name, kind in names.items() if isinstance(kind, type) and kind is not BackwardSlot}
    return sorted(name for name, kind in kinds.items() if issubclass(kind, BackwardSlot))


def _with_slot(cls: type[BackwardSlot], initialize: Callable[..., None]) -> Callable[..., None]:
    """Return an ``__init__`` that calls ``initialize`` and fills the slot; it has its signature and ``act_quant``."""
    parameters = list(inspect.signature(initialize).parameters.values())[1:]  # without `self`
    if initialize is nn.Module.__init__:  # which accepts any only to refuse them
        parameters = []
    named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    names = [parameter.name for parameter in named]
    takes_any_keyword = len(named) < len(parameters) and initialize is not cls.__dict__.get("__init__")

    def __init__(self: Any, *args: Any, act_quant: Any = None, **kwargs: Any) -> None:
        overrides = pop_settings(kwargs, names)
        _check_positions(cls, names, args)
        if act_quant is None and overrides:  # a name that is a setting of no quantizer, such as act_qaunt, raises below
            settings = {
                ACT_PREFIX + each for injector in derived(BackwardQuantSolver) for each in known_names(injector)
            }
            kwargs |= {name: value for name, value in overrides.items() if name not in settings}
        if takes_any_keyword:
            check_keywords(cls, names, kwargs, act_quant)
        initialize(self, *args, **kwargs)
        self.act_quant = None
        if act_quant is not None:
            fill_slot(self, act_quant, overrides)

    kind = inspect.Parameter
    itself = kind("self", kind.POSITIONAL_OR_KEYWORD)
    slot, rest = kind("act_quant", kind.KEYWORD_ONLY, default=None), kind("kwargs", kind.VAR_KEYWORD)
    __init__.__signature__ = inspect.Signature([itself, *named, slot, rest])  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    __init__.__module__ = cls.__module__
    return __init__


def _check_positions(cls: type[BackwardSlot], names: list[str], args: tuple[Any, ...]) -> None:
    """Raise for a quantizer without its keyword, which ``ReLU`` would mistake for a true ``inplace``."""
    for position, given in enumerate(args):
        if isinstance(given, BackwardInjectorType) and not "".join(names[position : position + 1]).endswith("_quant"):
            raise TypeError(
                f"{cls.__name__}: argument {position + 1} is {given.__name__}; a backward quantizer is passed by "
                f"keyword: act_quant={given.__name__}"
            )
