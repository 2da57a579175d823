"""Arguments of a call, and the tensors among them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brevact.private_names.of_torch import TreeSpec, is_functorch_tensor, tree_flatten, tree_unflatten

#: Tensor types without semantics of a subclass.
PLAIN_TYPES = frozenset((Tensor, nn.Parameter))

#: Types of arguments that neither are nor hold tensors.
CONSTANT_TYPES = frozenset(
    (
        *(bool, int, float, complex, str, type(None), slice, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)


_INTEGERS = frozenset((int,))

#: Data types of activations that are packed.
ACTIVATION_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
#: Data types of activations that are packed as pairs of real numbers.
COMPLEX_DTYPES = frozenset((torch.complex32, torch.complex64, torch.complex128))
_STRIDED = torch.strided


def is_plain(x: Any) -> bool:
    """Return whether ``x`` is a strided tensor and not a subclass with other semantics."""
    return type(x) in PLAIN_TYPES and x.layout is _STRIDED and not (x.is_nested or is_functorch_tensor(x))


def is_activation(x: Any) -> bool:
    """Return whether our Functions can pack ``x``: plain, floating point, 16 bits or more."""
    return (
        type(x) in PLAIN_TYPES
        and x.dtype in ACTIVATION_DTYPES
        and x.layout is _STRIDED
        and not (x.is_nested or is_functorch_tensor(x))
    )


def is_complex(x: Any) -> bool:
    return type(x) in PLAIN_TYPES and x.dtype in COMPLEX_DTYPES and is_plain(x)


def tensors_of_call(args: Sequence[Any], kwargs: dict[Any, Any]) -> list[Tensor]:
    """Return the tensors among the arguments, also in nested tuples, lists and dictionaries, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in PLAIN_TYPES:
            found.append(value)
        elif kind in CONSTANT_TYPES:
            continue
        elif isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_of_call(value, {})
        elif isinstance(value, dict):
            found += tensors_of_call((), value)
    return found


class BoundCall(NamedTuple):
    """A call with its constants; ``spec``: the structure of leaves, or the last ones' names if all are arguments.

    ``kinds``: of the leaves, so that calls with 1 and True, or with 0.0 and -0.0, are not equal.
    """

    function: Callable[..., Tensor]
    leaves: tuple[Any, ...]
    spec: TreeSpec | tuple[str, ...] = ()
    kinds: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        given = iter(tensors)
        leaves = [next(given) if leaf is Tensor else leaf for leaf in self.leaves]
        if type(self.spec) is tuple:
            first = len(leaves) - len(self.spec)
            return self.function(*leaves[:first], **dict(zip(self.spec, leaves[first:], strict=True)))
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def bound_call(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a call as a function of its tensors (:func:`tensors_of_call`): ``func`` itself if it has no constants."""
    leaves: tuple[Any, ...] = ()
    is_flat = True
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            leaves += (Tensor,)
        else:
            leaves += (arg,)
            kind = type(arg)
            is_flat = is_flat and (kind in CONSTANT_TYPES or (kind is tuple and _INTEGERS.issuperset(map(type, arg))))
    if is_flat:
        has_constants = kwargs or leaves.count(Tensor) < len(leaves)
        return BoundCall(func, leaves, tuple(kwargs), _kinds(leaves)) if has_constants else func
    found, spec = tree_flatten((args, kwargs))
    leaves = tuple([Tensor if isinstance(leaf, Tensor) else leaf for leaf in found])
    return BoundCall(func, leaves, spec, _kinds(leaves))


def _kinds(leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return types, and numbers as text where a zero may have a sign."""
    kinds = tuple(map(type, leaves))
    if float in kinds or complex in kinds:
        return tuple([repr(x) if kind in (float, complex) else kind for x, kind in zip(leaves, kinds, strict=True)])
    return kinds


def is_stored(kind: type[Tensor]) -> bool:
    """Return whether a tensor class has a storage, that is, no ``__torch_dispatch__`` of its own."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def as_tensors(value: Any, given: list[tuple[Tensor, Tensor]]) -> Any:
    """Replace subclass tensors that have a storage, except parameters, by plain ones; add the pairs to ``given``."""
    leaves, spec = tree_flatten(value)
    for place, x in enumerate(leaves):
        kind = type(x)
        if kind in PLAIN_TYPES or not (issubclass(kind, Tensor) and is_stored(kind)) or isinstance(x, nn.Parameter):
            continue
        found = next((tensor for tensor, other in given if other is x), None)  # torch asks whether query is key
        if found is None and x.layout is torch.strided:
            found = x.as_subclass(Tensor)
            given.append((found, x))
        leaves[place] = x if found is None else found
    return tree_unflatten(leaves, spec)


def as_given(result: Any, given: list[tuple[Tensor, Tensor]]) -> Any:
    """Replace in a result each plain tensor that :func:`as_tensors` made by the argument it was made from."""
    if isinstance(result, Tensor):
        return next((value for tensor, value in given if tensor is result), result)
    return type(result)(as_given(each, given) for each in result) if type(result) in (tuple, list) else result


class Parameters:
    """A torch function's parameters and their defaults, from ``"input weight=None"``, or a Python function's own."""

    def __init__(self, source: str | Callable) -> None:
        if isinstance(source, str):
            pairs = [each.partition("=") for each in source.split()]
            self._all = {name: ast.literal_eval(value) if is_given else ... for name, is_given, value in pairs}
        else:
            found = inspect.signature(source).parameters.values()
            self._all = {each.name: ... if each.default is each.empty else each.default for each in found}
        self._names = tuple(self._all)
        self._required = frozenset(name for name, default in self._all.items() if default is ...)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return all arguments of a call by name; None if the function refuses them."""
        names = self._names
        found = dict(zip(names, args, strict=False))
        if len(args) > len(names) or not found.keys().isdisjoint(kwargs):
            return None
        found |= kwargs
        if not self._required.issubset(found):
            return None
        found = {**self._all, **found}  # in order
        return found if len(found) == len(names) else None


def operands_beside(tensors: Sequence[Tensor], out: Any, *, is_first: bool) -> Sequence[Tensor]:
    """Return a call's tensors that its result depends on: without the first, or ``out``, if it fills its storage."""
    if not (isinstance(out, Tensor) and out.layout is _STRIDED and out.untyped_storage().nbytes() == out.nbytes):
        return tensors
    if is_first:
        return tensors[1:]
    places = [i for i, x in enumerate(tensors) if x is out]
    return [x for i, x in enumerate(tensors) if i != places[-1]] if places else tensors
