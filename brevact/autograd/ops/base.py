"""The base of the Functions: they save tensors in packed form, load them, and reject double backward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.call_arguments import bound_call
from brevact.autograd.deriving import known_values
from brevact.autograd.deriving.expressions import of_weight
from brevact.autograd.deriving.norms import WithStatistics
from brevact.autograd.region.settings import BackwardSettings, SaveMode
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import NO_DOUBLE_BACKWARD, Decoder, Region, Saved, Strides, lay_out
from brevact.autograd.saving.store import keep_exact
from brevact.private_names.of_torch import (
    DisableTorchFunction,
    active_fake_mode,
    disable_modes,
    is_batched,
    is_functorch_batched,
)
from brevact.qat.integer_codes import share_codes
from brevact.quantizers import PointFunction, Rounding, UniformQuantizer

_NO_BATCHES = (
    "a batch of gradients (is_grads_batched=True, torch.func.vmap over torch.autograd.grad) went through an op with "
    "backward-quantized activations: run one backward pass for each gradient, or set double_backward=True, which "
    "leaves these ops to PyTorch"
)
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


#: Which gradients are needed.
Needs = tuple[bool, ...]


class SavedValue(NamedTuple):
    tensors: tuple[Tensor, ...]
    decoder: Any

    def decode(self) -> Tensor:
        return self.decoder.decode(self.tensors)

    def decode_as(self, dtype: torch.dtype) -> Tensor:
        return self.decoder.decode_as(self.tensors, dtype)

    def multiply(self, grad: Tensor) -> Tensor:
        return self.decoder.multiply(self.tensors, grad)

    def with_statistics(self) -> WithStatistics:
        return self.decoder.with_statistics(self.tensors)


def save(ctx: Any, *items: Saved | None, exact: tuple[Tensor | None, ...] = ()) -> None:
    """Pass tensors to autograd, and the decoders of saved items to ``ctx``; ``exact`` tensors are saved unpacked."""
    tensors: list[Tensor | None] = []
    recipe: list[tuple[int, int, Decoder] | None] = []
    stop = 0
    for item in items:
        if item is None:
            recipe.append(None)
        else:
            kept, decoder = item
            if len(kept) > 2:  # possibly codes, a scale and a zero point, or those that a derived tensor reads
                share_codes(kept)
            start, stop = stop, stop + len(kept)
            tensors += kept
            recipe.append((start, stop, decoder))
    if storage_report.recorders and exact:
        for x in exact:
            if x is not None:
                keep_exact(x)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *exact)
    ctx.recipe, ctx.kept_count = recipe, stop


def load(ctx: Any) -> list[Any]:
    """Return the arguments of :func:`save`, items as :class:`SavedValue`; raise RuntimeError under double backward."""
    if _is_grad_enabled():  # create_graph=True: the gradient would be a constant to a second backward pass
        raise RuntimeError(NO_DOUBLE_BACKWARD)
    tensors = ctx.saved_tensors
    loaded: list[Any] = []
    for entry in ctx.recipe:
        if entry is not None:
            start, stop, decoder = entry
            entry = SavedValue(tensors[start:stop], decoder)
        loaded.append(entry)
    loaded += tensors[ctx.kept_count :]
    return loaded


class Formula(torch.autograd.Function):
    """An op of one handler: ``run`` saves and computes; ``gradients`` reads the output's gradient and the saved values.

    ``gradients`` holds sizes and numbers alone: a tensor in its closure would live as long as the graph. ``record`` is
    ``apply`` without the support for ``torch.func`` transforms, under which no region runs.
    """

    is_brevact = True
    record: Callable[..., Any]

    @staticmethod
    def forward(
        ctx: Any, region: Any, run: Callable[..., Any], gradients: Callable[..., tuple[Any, ...]], *tensors: Any
    ) -> Any:
        ctx.gradients = gradients
        out = run(ctx, *tensors)
        if isinstance(out, Tensor) and out._is_view() and not any(x is out or x is out._base for x in tensors):
            return out.detach()  # a view of a hidden tensor: torch refuses in-place changes of a Function's views
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return None for undefined gradients, which are not zeros: parameters in front then have none, as in torch."""
        is_defined = False
        for grad in grads:
            if grad is not None:
                is_defined = True
                if (is_batched(grad) or is_functorch_batched(grad)) and not _is_compiling():
                    raise RuntimeError(_NO_BATCHES)
        if not is_defined:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, None, *ctx.gradients(ctx.needs_input_grad[3:], *grads, *load(ctx))


Formula.record = super(torch.autograd.Function, Formula).apply  # of a class in C++


def times_mask(factor: float, stride: Strides | None, *, saved_first: bool = False, is_exact: bool = False) -> Callable:
    """Return the gradient g * mask * factor, laid out as torch's; ``is_exact``: 0 g is NaN where g is not finite."""

    def gradients(needs: Needs, grad: Tensor, kept: SavedValue) -> tuple[Tensor, ...]:
        product = grad * kept.decode() if is_exact or stride is None else kept.multiply(grad)
        if stride is not None:
            product = lay_out(product, grad, stride, saved_first=saved_first)
        return (product if factor == 1.0 else product.mul_(factor),)

    return gradients


def with_settings(region: Region, settings: BackwardSettings) -> Region:
    other = copy.copy(region)
    other.settings = settings
    return other


def with_bits(region: Region, bit_width: int) -> Region:
    """Return the region, or one whose quantizer has that many bits if its own has fewer, or packs in another way."""
    settings, quantizer = region.settings, region.settings.quantizer
    is_finer = settings.is_exact or settings.is_lossless or settings.keeps_elements
    if is_finer or (isinstance(quantizer, UniformQuantizer) and quantizer.bit_width >= bit_width):
        return region
    rounding = Rounding.STOCHASTIC if quantizer.is_stochastic else Rounding.NEAREST
    if isinstance(quantizer, UniformQuantizer):
        rounding = quantizer.rounding
    others = settings.save_mode, settings.min_numel, settings.derive_min_bits, settings.recompute
    return with_settings(region, _settings_of(rounding, bit_width, *others))


@functools.lru_cache(maxsize=64)
def _settings_of(
    rounding: Rounding, bit_width: int, save_mode: SaveMode, min_numel: int, derive_min_bits: int, recompute: int
) -> BackwardSettings:
    quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding)
    return BackwardSettings(quantizer, save_mode, min_numel, derive_min_bits=derive_min_bits, recompute=recompute)


InputLike = tuple[torch.Size, tuple[int, ...], torch.dtype]


def blank(input_like: InputLike, grad: Tensor) -> Tensor:
    """Return an uninitialized tensor of the input's sizes and the gradient's dtype, that of torch's autocast copy."""
    shape, stride, _ = input_like
    return torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device)


def is_inplace(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    if _out_of_place_name(func) is not None:
        return True
    position = _inplace_position(func)
    return bool(kwargs.get("inplace", False) or (position is not None and position < len(args) and args[position]))


@functools.cache
def _out_of_place_name(func: Callable) -> str | None:
    """Name of the out-of-place variant of a function with an in-place name; None for other functions."""
    name: str = func.__name__
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return f"__{name[3:]}" if name.startswith("__i") and name != "__invert__" else None


@functools.cache
def out_of_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    name = _out_of_place_name(function)
    if name is None:
        return function
    return next(getattr(home, name) for home in (Tensor, torch, F) if hasattr(home, name))


def may_overwrite(function: Callable[..., Tensor]) -> bool:
    return out_of_place(function) is not function or _inplace_position(function) is not None


def as_number(x: Any) -> Any:
    return x.item() if isinstance(x, Tensor) else x


def value_of(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PointFunction:
    """Return a call as a function of its first argument, never in place; the others are bound as numbers now."""
    function = out_of_place(function)
    if not args and kwargs.keys() <= {"inplace"}:
        return function
    args = tuple(map(as_number, args))
    position = _inplace_position(function)
    if position is not None and position <= len(args):
        args = (*args[: position - 1], False, *args[position:])
    named = {key: as_number(value) for key, value in kwargs.items() if key != "inplace"}
    return bound_call(function, (Tensor, *args), named)


@functools.cache
def _inplace_position(func: Callable) -> int | None:
    names = func.__code__.co_varnames[: func.__code__.co_argcount] if isinstance(func, FunctionType) else ()
    return names.index("inplace") if "inplace" in names else None


def run_inside(function: Callable) -> Callable:
    """Make the handler of a Python function of torch: its code runs under the mode, without its check for overrides."""
    checks = dict.fromkeys((f"has_torch_function{end}" for end in ("", "_unary", "_variadic")), lambda *tensors: False)
    body = FunctionType(function.__code__, {**function.__globals__, **checks}, function.__name__, function.__defaults__)

    def handle(region: Any, func: Callable, *args: Any, **kwargs: Any) -> Any:
        with region.mode:
            return body(*args, **kwargs)

    return handle


def can_pack(region: Region, x: Any) -> bool:
    """Return whether ``x`` is an activation that is large enough to pack and needs a gradient."""
    return region.can_pack_input(x) and x.requires_grad and x.numel() >= max(1, region.settings.min_numel)


def requires_grad(*tensors: Tensor | None) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def expanded_one(x: Tensor) -> Tensor:
    """Return a gradient of ones for ``x``: ATen's backward kernels then return a derivative or a mask."""
    make = _one.__wrapped__ if active_fake_mode() else _one  # fake tensors must not stay in the cache
    return make(x.dtype, x.device).expand(x.shape)


@functools.lru_cache(maxsize=64)
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


@contextmanager
def outside_regions(device: torch.device) -> Iterator[None]:
    """Record a graph on the backward's device as if no region, hooks or autocast were active."""
    with (
        torch.enable_grad(),
        DisableTorchFunction(),
        torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x),
        nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False),
    ):
        yield


def gradients_of(compute: Callable, tensors: list[Tensor], needs: Needs, grad: Tensor) -> list[Tensor | None]:
    leaves = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, needs, strict=True)]
    with outside_regions(grad.device):
        found = iter(torch.autograd.grad(compute(*leaves), [x for x in leaves if x.requires_grad], grad))
    return [next(found) if needed else None for needed in needs]


class OfWeight(Formula):
    """A Formula whose result is computed from weights."""

    is_brevact = False


OfWeight.record = super(torch.autograd.Function, OfWeight).apply


def compute_from_weight(
    region: Region, compute: Callable[..., Tensor], *tensors: Tensor, gradients: Callable | None = None
) -> Tensor:
    """Compute a function of a weight, the first tensor; backward reruns ``compute``: no random numbers, no state.

    ``gradients``: the gradients from the tensors, which of them need one, and the result's; None differentiates.
    """

    def run(ctx: Any, *tensors: Tensor) -> Tensor:
        save(ctx, exact=tensors)
        out = compute(*tensors)
        if out.shape == tensors[0].shape:  # statistics are small: saved unpacked
            known_values.register(out, *of_weight(compute, tuple(x.detach() for x in tensors), out))
        return out

    def through(needs: Needs, grad: Tensor, *tensors: Tensor) -> Sequence[Tensor | None]:
        return (gradients or functools.partial(gradients_of, compute))([*tensors], needs, grad)

    with DisableTorchFunction():
        out: Tensor = region.apply(OfWeight, run, through, *tensors)
        region.mark(out, is_weight=True)
        return out


@functools.cache
def clamp_passes_bounds() -> bool:
    """Return whether ``clamp`` passes the gradient of an element equal to a bound: in torch 2.13, not in 2.15."""
    return _gradient(lambda x: x.clamp(0.0, 1.0), 0.0) == 1.0


def _gradient(function: Callable[..., Tensor], *values: float) -> float:
    with disable_modes(), torch.inference_mode(False), outside_regions(torch.device("cpu")):
        numbers = [torch.tensor(value, device="cpu", dtype=torch.float32).requires_grad_() for value in values]
        return float(torch.autograd.grad(function(*numbers), numbers[0])[0])
