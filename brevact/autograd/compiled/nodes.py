"""Regions in graphs: one node per torch function with a counterpart.

Dynamo puts the nodes into its graph unchanged. AOTAutograd runs them with fake tensors, so that the same handlers and
Functions as in eager mode record the saved tensors, and kernels as ops of ``torch.ops.brevact``.

Differences from eager regions: the graph draws seeds, on the tensor's device, anew in each run (of a CUDA graph, too);
its history in the graph decides whether a tensor is an activation; a tensor that several ops save is packed once by the
compiler, which merges equal ops.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from brevact.autograd.call_arguments import bound, bound_call, tensors_of_call
from brevact.autograd.compiled.tracking import TRACKED, run_tracked
from brevact.autograd.normalizing import NormInput
from brevact.autograd.ops.base import Saving, is_inplace, keep_sizes, load, requires_grad, save
from brevact.autograd.ops.recompute import outside_regions
from brevact.autograd.rows import ROWS, row_of, run_counterpart
from brevact.autograd.saved import ACTIVATION_DTYPES, Saved
from brevact.autograd.seeds import draw_anew, rank_seed
from brevact.autograd.settings import BackwardSettings, SaveMode
from brevact.autograd.store import keep_as_it_is, keep_small, pack
from brevact.autograd.weights import comes_from_layer
from brevact.private_names.of_torch import (
    DisableTorchFunction,
    EnableTorchFunction,
    FunctionalTensor,
    WeakTensorKeyDictionary,
    tracing_context,
)
from brevact.quantizers import Layout, from_text, is_traced

#: Text of a region without a quantizer.
FULL_PRECISION = ""

_SAVING = [
    func
    for func, row in ROWS.items()
    if row.handler
    or row.is_product
    or (row.reads_sizes and "max" not in func.__name__ and not is_inplace(func, (), {}))  # those return indices, too
]
_IN_GRAPHS: dict[Callable, None] = dict.fromkeys((*_SAVING, *TRACKED))
#: Names, equal in all processes: they are part of the compiler's cache keys.
NAMES: dict[Callable, str] = {func: f"{func.__name__} {i}" for i, func in enumerate(_IN_GRAPHS)}
#: Functions that save nothing: their results may derive from their arguments (``derived.Kind``).
DERIVING = frozenset(NAMES) - set(_SAVING)
_FUNCTIONS: dict[str, Callable] = {name: func for func, name in NAMES.items()}


def function_of(name: str) -> Callable:
    return _FUNCTIONS[name]


@torch.compiler.assume_constant_result
def rounds_norm(name: str, text: str) -> bool:
    """Return whether a norm returns rounded values, also in eval mode and without gradients."""
    row, settings = row_of(_FUNCTIONS[name]), from_text(text)
    settings = settings.by_op.get(row.name, settings)
    return row.rounds_forward and settings is not None and settings.quantizes_forward


@torch.compiler.allow_in_graph
def call_in_graph(name: str, text: str, parameters: tuple[int | str, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Record a torch function's counterpart; the settings are text, the parameters positions or names."""
    func = _FUNCTIONS[name]
    with DisableTorchFunction():  # the mode that Dynamo traced may actually be active
        return _call(func, text, parameters, args, kwargs)


def _call(func: Callable, text: str, parameters: tuple[int | str, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
    found = [kwargs[i] if isinstance(i, str) else args[i] for i in parameters]
    if kwargs:
        args, kwargs = bound(func, args, kwargs)
    if text != FULL_PRECISION:
        return _call_in(_TracedRegion(from_text(text), found), func, args, kwargs)
    return _call_in_full_precision(found, func, args, kwargs)


def _call_in_full_precision(parameters: list[Tensor], func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run torch's own function; mark an activation's product, whose node does not show if its factors are weights."""
    row, result = row_of(func), func(*args, **kwargs)
    if not (row.is_product or row.is_layer) or is_inplace(func, args, kwargs):
        return result
    if not isinstance(result, Tensor) or not result.requires_grad:
        return result
    region = _TracedRegion(None, parameters)
    is_weight = not row.is_layer and region.are_weights(*tensors_of_call(args, kwargs))
    return result if is_weight else _Product.apply(result)


def _call_in(region: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    by_op = region.settings.by_op
    if by_op:
        name = row_of(func).name
        if name in by_op:
            settings = by_op[name]
            if settings is None:
                return _call_in_full_precision(region.parameters, func, args, kwargs)
            return _call_in(_TracedRegion(settings, region.parameters), func, args, kwargs)
        if func is F.multi_head_attention_forward:  # whose ops may have settings of their own
            return run_counterpart(row_of(func), region, func, args, kwargs)
        if region.settings.quantizer is None:
            return _call_in_full_precision(region.parameters, func, args, kwargs)
    return run_tracked(region, functools.partial(_run, region, func), func, args, kwargs)


def _run(region: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if func in NAMES:
        row = row_of(func)
        is_of_weight = row.is_norm and region.are_weights(*tensors_of_call(args, kwargs))
        if row.handler is None or is_of_weight:
            result = NotImplemented
        elif not is_inplace(func, args, kwargs):
            result = run_counterpart(row, region, func, args, kwargs)
        else:  # the compiler tracks in-place changes by ops of its own, not by Functions
            region.copy = args[0].clone()
            known = region.find_known(args[0])
            if known is not None:
                region.register(region.copy, known)
            result = run_counterpart(row, region, func, (region.copy, *args[1:]), kwargs)
            if result is not NotImplemented:
                known = region.find_known(result)
                result = args[0].copy_(result)
                if known is not None:
                    region.register(result, known)
        if result is not NotImplemented:
            return result
        if row.is_product and not region.are_weights(*tensors_of_call(args, kwargs)):
            return _Product.apply(func(*args, **kwargs))
        if row.reads_sizes and func in _SAVING and not is_of_weight:
            return _OfSizes.apply(bound_call(func, args, kwargs), *tensors_of_call(args, kwargs))
    return func(*args, **kwargs)


class _OfSizes(Saving):
    """A function whose gradient reads only the sizes of floating-point tensors: backward runs it on blank ones."""

    @staticmethod
    def forward(ctx: Any, call: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.call, ctx.blanks = call, [keep_sizes(x)[1] if x.is_floating_point() else None for x in tensors]
        save(ctx, exact=tuple(x if blank is None else None for x, blank in zip(tensors, ctx.blanks, strict=True)))
        return call(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs, given = ctx.needs_input_grad[1:], zip(load(ctx), ctx.blanks, strict=True)
        tensors = [x if blank is None else blank.decode(()) for x, blank in given]
        wanted = [x.requires_grad_() for x, needed in zip(tensors, needs, strict=True) if needed]
        with outside_regions(grad.device):
            found = iter(torch.autograd.grad(ctx.call(*tensors), wanted, grad))
        return None, *(next(found) if needed else None for needed in needs)


class _InnerMode(TorchFunctionMode):
    def __init__(self, region: _TracedRegion) -> None:
        super().__init__()
        self._region = region

    def __enter__(self) -> _InnerMode:
        self._enabled = EnableTorchFunction()  # disabled inside a graph node
        self._enabled.__enter__()
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._enabled.__exit__(*exc_info)

    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with DisableTorchFunction():
            return _call_in(self._region, func, args, kwargs or {})


class _Product(Saving):
    """Marks an activation's product in the graph: later ops compute activations from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # not a view: a Function's must not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _TracedRegion:
    """Handlers' view of a region, for one call in a traced graph."""

    recompute = 0  # the compiler decides which tensors a graph recomputes

    def __init__(self, settings: BackwardSettings | None, parameters: list[Tensor]) -> None:
        self.settings: Any = settings
        self.parameters = parameters
        self.mode = _InnerMode(self)
        self.copy: Tensor | None = None  # of the overwritten argument

    def is_activation(self, x: Any) -> bool:
        return isinstance(x, Tensor) and is_traced(x) and x.dtype in ACTIVATION_DTYPES and x.layout is torch.strided

    def packs_layer_input(self, x: Any) -> bool:
        return self.is_activation(x) and not any(x is parameter for parameter in self.parameters)

    def packs_layer(self, input: Any, weight: Any, bias: Tensor | None = None) -> bool:
        return self.packs_layer_input(input) and self.is_activation(weight) and requires_grad(input, weight, bias)

    def packs_input(self, x: Any) -> bool:
        return self.packs_layer_input(x) and not self.is_weight(x)

    def is_weight(self, x: Tensor) -> bool:
        """Whether ``x`` is a parameter, or was computed in the graph without a layer, so possibly from parameters."""
        node = x.grad_fn
        if self.copy is not None and x is self.copy:  # its input is the compiler's own copy of an overwritten input
            while node is not None and node.name().startswith("CloneBackward"):
                node = node.next_functions[0][0]
        if node is None or not node.next_functions:  # an input of the graph
            return any(x is parameter for parameter in self.parameters)
        return not comes_from_layer(node)

    def are_weights(self, *tensors: Tensor) -> bool:
        return all(map(self.is_weight, tensors))

    def torch_runner(self, *tensors: Tensor | None) -> None:
        return None  # graphs have no hooks

    def apply(self, function: Any, *args: Any) -> Any:
        return function.apply(self, *args)

    def find_known(self, x: Tensor) -> Saved | None:
        entry = _known.get(x) if isinstance(x, FunctionalTensor) else None
        if entry is None:
            return None
        version, known = entry
        return known if version == x._version and known[1].quality.serves(self.settings) else None

    def find_kept(self, x: Tensor) -> Saved | None:
        known = self.find_known(x)
        if known is None and isinstance(x, FunctionalTensor) and self.settings.derives:
            known = _drawn.get(x, {}).get(("packed", x._version, self.settings.key))
        return known

    def register(self, out: Tensor, kept: Saved, *, is_dirty: bool = False, is_new: bool = False) -> None:
        if isinstance(out, FunctionalTensor):  # ops that Dynamo itself runs leave no trace
            _known[out] = out._version + is_dirty, kept

    def keep(self, x: Tensor, *, share: bool = True, norm: NormInput | None = None) -> Saved:
        if x.numel() < self.settings.min_numel:
            return keep_small(x, self.settings) if norm is None else norm.unpacked(keep_small(x, self.settings))
        known = self.find_known(x) if share and norm is None else None
        if known is not None:
            return known
        if self.settings.is_exact:
            return keep_as_it_is(x) if norm is None else norm.unpacked(keep_as_it_is(x))
        quantizer = self.settings.quantizer
        if norm is not None and self.settings.is_lossless:
            return norm.unpacked(self.keep(x, share=share))
        of = "" if norm is None else f" {norm.key}"
        if self.settings.draws_size:
            quantizer = self._once(f"quantizer{of}", x, share, lambda: self._sized(x))
        key = self._once(f"seed{of}", x, share, lambda: draw_anew(x.device)) if quantizer.is_stochastic else 0
        is_later = self.settings.save_mode is not SaveMode.SAVE_QUANTIZED  # ops may overwrite x before backward
        kept = pack(x.detach().clone() if is_later else x.detach(), quantizer, self.settings.save_mode, key, norm)
        if share and norm is None and isinstance(x, FunctionalTensor):
            _drawn.setdefault(x, {})["packed", x._version, self.settings.key] = kept
        return kept

    def keep_levels(self, x: Tensor, norm: NormInput) -> Saved:
        return _TracedRegion(self.settings.for_normalized, []).keep(x, norm=norm)

    def keep_activation(self, x: Tensor) -> Saved:
        # Without a gradient it is a mask or a buffer, which is held elsewhere anyway.
        return self.keep(x) if x.requires_grad and not self.is_weight(x) else keep_as_it_is(x)

    def keep_weight(self, x: Tensor) -> Saved:
        return keep_as_it_is(x)

    def _sized(self, x: Tensor) -> Any:
        """Draw the quantizer's size once for all runs, by torch's seed, rank, and the tensor's size and position."""
        numel = int(Layout.of(x).numel)
        seed = (torch.default_generator.initial_seed() ^ rank_seed()) + numel * _PLACES + _next_place()
        return self.settings.quantizer.with_drawn_size(numel, seed % 2**63)

    def _once(self, name: str, x: Tensor, share: bool, draw: Callable[[], Any]) -> Any:
        """Draw in the graph: once if a tensor is packed again, so that both packing ops are equal."""
        if not share or not isinstance(x, FunctionalTensor):  # ops that Dynamo itself runs leave no trace
            return draw()
        drawn = _drawn.setdefault(x, {})
        key = name, x._version, self.settings.key
        if key not in drawn:
            drawn[key] = draw()
        return drawn[key]


_drawn: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
#: Version and saved form of each graph tensor that derives from packed ones.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_PLACES = 1 << 20
_places: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


def _next_place() -> int:
    """Count the sizes drawn while the current graph is traced; 0 outside Dynamo."""
    context = tracing_context()
    return 0 if context is None else next(_places.setdefault(context, itertools.count()))
