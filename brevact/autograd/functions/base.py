"""What the Functions have in common: saving kept tensors, reading them, refusing a second derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.keeping import AS_IT_IS, Decoder, Kept

NO_DOUBLE_BACKWARD = (
    "double backward (create_graph=True) through an op with backward-quantized activations is not supported: the "
    "stored codes have no derivative. Run the part of the model that needs second derivatives at full precision (a "
    "policy rule with None, brevact.restore_backward(model), or outside brevact.backward_quant)"
)


class Loaded:
    """A kept tensor on its way back: decoded when it is asked for."""

    __slots__ = ("decoder", "tensors")

    def __init__(self, tensors: tuple[Tensor, ...], decoder: Decoder) -> None:
        self.tensors = tensors
        self.decoder = decoder

    def decode(self) -> Tensor:
        return self.decoder.decode(self.tensors)

    def multiply(self, grad: Tensor) -> Tensor:
        """Return the product with ``grad``; packed codes are decoded and multiplied in one pass."""
        return self.decoder.multiply(self.tensors, grad)


def save(ctx: Any, *items: Kept | Tensor | None) -> None:
    """Hand the tensors of ``items`` to autograd and their decoders to ``ctx``; plain tensors are kept as they are."""
    tensors: list[Tensor] = []
    recipe: list[tuple[int, Decoder] | None] = []
    for item in items:
        if item is None:
            recipe.append(None)
        elif type(item) is tuple:
            tensors += item[0]
            recipe.append((len(item[0]), item[1]))
        else:
            tensors.append(item)
            recipe.append((1, AS_IT_IS))
    ctx.save_for_backward(*tensors)
    ctx.recipe = recipe


def load(ctx: Any) -> list[Any]:
    """Return what :func:`save` was given, as :class:`Loaded`; None for None."""
    tensors = ctx.saved_tensors
    loaded: list[Any] = []
    start = 0
    for entry in ctx.recipe:
        if entry is None:
            loaded.append(None)
        else:
            count, decoder = entry
            loaded.append(Loaded(tensors[start : start + count], decoder))
            start += count
    return loaded


class Saving(torch.autograd.Function):
    """A Function that saves packed activations; its ``backward`` is differentiable once.

    ``record`` is ``apply`` without the support for ``torch.func`` transforms, under which no region runs.
    """

    is_brevact = True
    record: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.record = super(torch.autograd.Function, cls).apply
        if "backward" in cls.__dict__:
            cls.backward = staticmethod(_once_differentiable(cls.__dict__["backward"].__func__))


def _once_differentiable(backward: Callable) -> Callable:
    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: the gradient would be a constant to a second backward pass
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        return backward(ctx, *grads)

    return wrapper


_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
_ACTIVATION_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def is_plain(x: Any) -> bool:
    """Return whether ``x`` is a strided tensor of no subclass that could mean something else."""
    return (
        type(x) in _PLAIN_TYPES
        and x.layout is torch.strided
        and not (x.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(x))
    )


def is_activation(x: Any) -> bool:
    """Return whether ``x`` is a tensor that a Function of ours can pack: plain, floating point, 16 bits or more."""
    return is_plain(x) and x.dtype in _ACTIVATION_DTYPES


def requires_grad(*tensors: Tensor | None) -> bool:
    """Return whether any of the tensors requires a gradient."""
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def as_tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return one number a spatial dimension, as torch's layers accept them."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def expanded_one(x: Tensor) -> Tensor:
    """Return a gradient of ones for ``x``: with it ATen's backward kernels give a derivative or a mask."""
    return _one(x.dtype, x.device).expand(x.shape)


@functools.lru_cache(maxsize=64)
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)
