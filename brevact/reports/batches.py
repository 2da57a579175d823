"""Arguments of a model: checked, and each tensor in a storage of its own size."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from brevact.quantizers.brief import brief

_ACCEPTED = (
    "accepted is what the model is called with: a tensor, a tuple or list of positional arguments, or a mapping of "
    "keyword arguments"
)

_INPUTS_ALONE = "of (inputs, targets), pass the inputs alone: memory_report(model, batch[0])"


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch (a tensor, a tuple or list, or a mapping) as positional and keyword arguments."""
    _refuse_no_batch(batch)
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    if isinstance(batch, Mapping):
        args, kwargs = (), dict(batch)
    elif isinstance(batch, tuple | list) and not _is_one_argument(batch):
        args, kwargs = tuple(batch), {}
    else:
        args, kwargs = (batch,), {}
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of a compiled function
        return args, kwargs
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        own = f"{type(model).__name__}.forward({', '.join(signature.parameters)})"
        several = f". A {type(batch).__name__} holds positional arguments; {_INPUTS_ALONE}"
        raise TypeError(
            f"batch: {brief(batch)} does not fit {own}: {error}{several if len(args) > 1 else f'; {_ACCEPTED}'}"
        ) from None
    return args, kwargs


def _is_one_argument(batch: tuple | list) -> bool:
    """Whether a tuple is one value: a packed sequence, a Brevitas QuantTensor."""
    return isinstance(batch, nn.utils.rnn.PackedSequence) or hasattr(type(batch), "__torch_function__")


def _refuse_no_batch(batch: Any) -> None:
    fix = ""
    if isinstance(batch, DataLoader | Iterator):
        fix = (
            "; pass one batch, without its targets: inputs, targets = next(iter(loader)); memory_report(model, inputs)"
        )
    elif not (batch is None or isinstance(batch, Dataset | str | bytes | bool | int | float | nn.Module | type)):
        return
    raise TypeError(f"batch: got {brief(batch)} of type {type(batch).__name__}; {_ACCEPTED}{fix}")


def without_surroundings(arguments: Any, copies: dict[int, Tensor] | None = None) -> Any:
    """Replace tensors that are slices of larger storages by copies; `copies` maps the originals' ids to them."""
    copies = {} if copies is None else copies
    if type(arguments) is Tensor and arguments.layout is torch.strided and not arguments.is_nested:
        if arguments.untyped_storage().nbytes() <= arguments.nbytes:
            return arguments
        if id(arguments) not in copies:
            copies[id(arguments)] = arguments.detach().clone().requires_grad_(arguments.requires_grad)
        return copies[id(arguments)]
    if type(arguments) in (tuple, list):
        return type(arguments)(without_surroundings(x, copies) for x in arguments)
    if type(arguments) is dict:
        return {name: without_surroundings(x, copies) for name, x in arguments.items()}
    return arguments


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, nested in tuples, lists, mappings and dataclass fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for x in value.values():
            yield from tensors_of(x)
    elif isinstance(value, tuple | list):
        for x in value:
            yield from tensors_of(x)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name))
