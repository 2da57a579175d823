"""Regions in graphs that `torch.compile` traces.

Two stages run this module. *Dynamo* follows Python code symbolically: it runs :func:`traced_call` for each torch
function and :func:`enter` and :func:`leave` for each module, which therefore keep to what it understands and have no
state but the stack of modes. :func:`_call_in_graph` becomes one node of the graph; *AOTAutograd* runs it with tensors
that have no values, so that the same handlers and Functions as without a compiler record what is stored, kernels
standing as ops of ``torch.ops.brevact``.

What differs from a region without a compiler: a function without a counterpart is left to the compiler; seeds are drawn
by the graph, on the tensor's device, anew in each run (of a CUDA graph too); a tensor is taken for an activation if its
history in the graph says so; a tensor that several ops save is packed once by the compiler, which sees equal ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.variables.torch import get_overridable_functions
from torch._ops import HigherOrderOperator
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from brevact.autograd.functions import HANDLERS
from brevact.autograd.functions.base import ACTIVATION_DTYPES, Saving, is_inplace
from brevact.autograd.functions.kinds import PRODUCTS
from brevact.autograd.keeping import Kept, keep_as_it_is, pack
from brevact.autograd.provenance import comes_from_layer, tensors_in
from brevact.autograd.settings import BackwardSettings
from brevact.quantizers import Layout, draw_seed, is_traced, read

F = TypeVar("F", bound=Callable[..., Any])

#: Whether Dynamo would compile the functions called here, being between the graphs of a compiled model: not None then.
frame_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def skipped_by_dynamo(function: F) -> F:
    """Let Dynamo run a function as it is where Python calls it, and trace it where it is called in traced code."""
    skip_code(function.__code__)
    return function


def is_compiled_graph(frame: FrameType) -> bool:
    """Return whether the function that autograd saves tensors for, applied in this frame, is a compiled graph."""
    caller = frame.f_back
    return (
        frame.f_code is _APPLY
        and caller is not None
        and caller.f_globals.get("__name__", "").startswith("torch._functorch.")
    )


_APPLY = torch.autograd.Function.apply.__func__.__code__
#: Whether `torch.export` runs: an exported program has no backward pass, so that nothing is packed in it.
is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)
out_of_dynamo = torch.compiler.disable


# Dynamo shows modes the functions of this set alone, where F.hardswish and torch.relu_ are missing.
get_overridable_functions().update(HANDLERS)

FULL_PRECISION = ""

_NAMES: dict[Callable, str] = {func: f"{func.__name__} {i}" for i, func in enumerate((*HANDLERS, *PRODUCTS))}
_FUNCTIONS: dict[str, Callable] = {name: func for func, name in _NAMES.items()}


class RegionMode(TorchFunctionMode):
    """A mode with the settings of the innermost region that it stands for, as text (:func:`text_of`)."""

    spelled: str | None


class TracingMode(RegionMode):
    """The region of a module that Dynamo inlines, or of a ``with`` block in traced code.

    Args:
        spelled: what ops inside store.
        owner: the module whose forward runs in the region; None for a ``with`` block.
    """

    def __init__(self, spelled: str | None, owner: nn.Module | None = None) -> None:
        super().__init__()
        self.spelled = spelled
        self.owner = owner

    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return traced_call(self, func, types, args, kwargs or {})


def text_of(settings: BackwardSettings | None) -> str | None:
    """The settings of a region as text: empty for full precision, None if there is no text for the quantizer."""
    return FULL_PRECISION if settings is None else settings.spelled


def traced_call(mode: RegionMode, func: Callable, types: tuple[type, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a torch function that a mode has caught, by its counterpart if it has one."""
    for kind in types:
        if not issubclass(kind, Tensor):  # a Brevitas QuantTensor: its own rule runs, the mode sees the ops inside
            with mode:
                return kind.__torch_function__(func, types, args, kwargs)
    if isinstance(func, HigherOrderOperator):
        return _call_higher_order(func, args, kwargs)
    name = _NAMES.get(func)
    if name is None or not torch.is_grad_enabled() or is_exporting():
        return func(*args, **kwargs)
    if mode.spelled is None:
        raise TypeError(
            "the backward quantizer of this region cannot be compiled: it has no text form. Make it a dataclass at the "
            "top level of a module, with fields that are numbers, strings, None, enums or dtypes"
        )
    # At full precision, too: in the graph the function is out of reach of a region around this one.
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
    named = tuple(key for key, value in kwargs.items() if isinstance(value, nn.Parameter))
    parameters = (*(i for i, arg in enumerate(args) if isinstance(arg, nn.Parameter)), *named)
    return _call_in_graph(name, mode.spelled, parameters, args, kwargs)


def _call_higher_order(func: HigherOrderOperator, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an op that traces a function of its own, without regions: what a checkpoint recomputes is not stored."""
    _inside.higher_order += 1
    result = func(*args, **kwargs)
    _inside.higher_order -= 1
    return result


class _Inside:
    higher_order = 0


_inside = _Inside()


@torch.compiler.allow_in_graph
def _call_in_graph(
    name: str, spelled: str, parameters: tuple[int | str, ...], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Record the counterpart of a torch function; the settings travel as text, parameters as positions or names."""
    func = _FUNCTIONS[name]
    with torch._C.DisableTorchFunction():  # the mode that Dynamo followed may be active for real
        return _call(func, spelled, parameters, args, kwargs)


def _call(func: Callable, spelled: str, parameters: tuple[int | str, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
    if spelled != FULL_PRECISION:
        region = _TracedRegion(read(spelled), [kwargs[i] if isinstance(i, str) else args[i] for i in parameters])
        if func in PRODUCTS:
            result = func(*args, **kwargs)
            return result if region.are_weights((args, kwargs)) else _Product.apply(result)
        if not is_inplace(func, args, kwargs):
            result = HANDLERS[func](region, func, *args, **kwargs)
        else:  # the compiler knows in-place changes by ops of its own, not by Functions
            region.copy = args[0].clone()
            result = HANDLERS[func](region, func, region.copy, *args[1:], **kwargs)
            if result is not NotImplemented:
                result = args[0].copy_(result)
        if result is not NotImplemented:
            return result
    return func(*args, **kwargs)


class _Product(Saving):
    """Marks the product of an activation in the graph: what follows is computed from an activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _TracedRegion:
    """What the handlers ask of a region, answered from one call alone."""

    def __init__(self, settings: BackwardSettings, parameters: list[Tensor]) -> None:
        self.settings = settings
        self._parameters = parameters
        self.copy: Tensor | None = None  # of the argument that is overwritten

    def is_activation(self, x: Any) -> bool:
        return isinstance(x, Tensor) and is_traced(x) and x.dtype in ACTIVATION_DTYPES and x.layout is torch.strided

    def packs_layer_input(self, x: Any) -> bool:
        return self.is_activation(x) and not any(x is parameter for parameter in self._parameters)

    def packs_input(self, x: Any) -> bool:
        return self.packs_layer_input(x) and not self.is_weight(x)

    def is_weight(self, x: Tensor) -> bool:
        """Whether ``x`` is a parameter, or was computed in the graph without a layer: from parameters, it may be."""
        node = x.grad_fn
        if self.copy is not None and x is self.copy:  # behind it, the compiler's own copy of an input it overwrites
            while node is not None and node.name().startswith("CloneBackward"):
                node = node.next_functions[0][0]
        if node is None or not node.next_functions:  # an input of the graph
            return any(x is parameter for parameter in self._parameters)
        return not comes_from_layer(node)

    def are_weights(self, arguments: Any) -> bool:
        return all(self.is_weight(x) for x in tensors_in(arguments))

    def apply(self, function: Any, *args: Any) -> Any:
        return function.apply(self, *args)

    def keep(self, x: Tensor, *, share: bool = True) -> Kept:
        if x.numel() < self.settings.min_numel:
            return keep_as_it_is(x)
        quantizer = self.settings.quantizer
        if self.settings.draws_size:  # once, for all runs of the graph
            quantizer = quantizer.sized(int(Layout.of(x).numel), torch.default_generator.initial_seed() + next(_draws))
        seed = self._seed(x, share) if quantizer.is_stochastic else 0
        return pack(x.detach(), quantizer, self.settings.save_mode, seed)

    def keep_activation(self, x: Tensor) -> Kept:
        # Without a gradient it is a mask or a buffer, which somebody holds anyway.
        return self.keep(x) if x.requires_grad and not self.is_weight(x) else keep_as_it_is(x)

    def _seed(self, x: Tensor, share: bool) -> Tensor:
        """A seed drawn in the graph: the same for a tensor that is packed again, so that both ops are one."""
        if not share or not isinstance(x, FunctionalTensor):  # what Dynamo itself runs leaves no trace
            return draw_seed(x.device)
        seeds = _seeds.setdefault(x, {})
        key = x._version, self.settings.key
        if key not in seeds:
            seeds[key] = draw_seed(x.device)
        return seeds[key]


_seeds: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_draws = itertools.count()


def enter(settings: BackwardSettings | None, module: nn.Module) -> None:
    """Enter the region of a module whose forward Dynamo inlines, unless the one around it has the same settings."""
    if _inside.higher_order or not torch.is_grad_enabled() or is_exporting():
        return
    around, spelled = _innermost(), text_of(settings)
    if around is None:
        if not module.training or spelled == FULL_PRECISION:
            return
    elif around.spelled == spelled and not _belongs_to(around, module):
        return
    TracingMode(spelled, module).__enter__()


def leave(module: nn.Module | None) -> None:
    """Leave the region that :func:`enter` entered for the module, if it did."""
    around = _innermost()
    if _belongs_to(around, module):
        around.__exit__(None, None, None)


def _belongs_to(mode: Any, module: nn.Module | None) -> bool:
    return type(mode) is TracingMode and mode.owner is module


def _innermost() -> Any:
    """The innermost mode that is a region's."""
    for depth in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(depth)
        if isinstance(mode, RegionMode):
            return mode
    return None
