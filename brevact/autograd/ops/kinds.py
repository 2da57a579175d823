"""Torch functions that the fallback must not treat alike, where they have no counterpart for their arguments.

*Exact*: those outside the closed table of :mod:`~brevact.autograd.ops.harmless`, and some of its neighbours by
their arguments: a division by an activation (1/b^2), powers other than squares, and recurrent layers on a GPU whose
weights cuDNN copies into one flat tensor, which nobody could tell from an activation.

*Layers*: what they return is an activation, even if only a weight went in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import is_activation
from brevact.autograd.ops.harmless import HARMLESS, everywhere
from brevact.autograd.provenance import is_parameter, tensors_in
from brevact.autograd.storages import storage_address
from brevact.private_names.of_torch import is_any_autocast_enabled

_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_NORMS = everywhere(
    *("layer_norm", "group_norm", "instance_norm", "rms_norm", "batch_norm", "native_layer_norm"),
    "local_response_norm",
)

_RECURRENT = frozenset(everywhere("lstm", "gru", "rnn_tanh"))
_DIVISIONS = frozenset((*everywhere("div", "divide", "true_divide"), Tensor.__truediv__, Tensor.__itruediv__))
_RECIPROCALS = frozenset((Tensor.__rtruediv__, Tensor.__rdiv__))
_POWERS = frozenset((*everywhere("pow"), Tensor.__pow__, Tensor.__ipow__, Tensor.__rpow__))
#: Functions whose arguments say whether what they save is exact.
CONDITIONAL = _RECURRENT | _DIVISIONS | _RECIPROCALS | _POWERS

#: Operators of other libraries that read their input at points which they save.
_EXACT_OPERATORS = frozenset(
    ("torchvision", name) for name in ("deform_conv2d", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")
)
_OPERATORS = type(torch.ops.aten.log), type(torch.ops.aten.log.default)

#: Modules of torch whose functions are one op to their caller and many to a region: what they save is like what the
#: decompositions save that they end in.
ALGORITHMS = frozenset(("torch._lowrank", "torch._linalg_utils", "torch._lobpcg"))

#: Ask for what a tensor is, not for its values.
_UNSEEN = frozenset(
    getattr(Tensor, name)
    for name in (
        *("data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "ndimension"),
        *("nelement", "numel", "size", "storage_offset", "stride", "untyped_storage"),
    )
)
#: Count in place: of an integer (the batches that a norm has seen) nothing is stored, and nothing made of it trains.
_COUNTING = frozenset((Tensor.add_, Tensor.__iadd__, Tensor.sub_, Tensor.__isub__, Tensor.fill_, Tensor.zero_))
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
#: Let their caller change values without the version counter seeing it.
UNCOUNTED = frozenset((Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__))  # type: ignore[attr-defined]
#: Functions of which :func:`stores_nothing` knows something.
ASIDE = frozenset((*_UNSEEN, *UNCOUNTED, *_COUNTING, Tensor.__getitem__))
#: Matrix products, whose factors may be weights or activations.
PRODUCTS = frozenset(
    (
        *everywhere("matmul", "mm", "bmm", "mv", "dot", "addmm", "addbmm", "baddbmm", "addmv"),
        *(torch.einsum, Tensor.__matmul__, Tensor.__rmatmul__),
    )
)
_GETITEM = Tensor.__getitem__
_VIEWING = frozenset((int, slice, type(None), type(Ellipsis)))
LAYERS = frozenset(
    (
        *everywhere("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *everywhere("linear", "bilinear", "embedding", "embedding_bag"),
        *_NORMS,
        *_ATTENTION,
    )
)


def stores_nothing(func: Callable, args: tuple) -> bool:
    """Return whether a region need not look at a call of an attribute (``x.shape``) or of a function :data:`ASIDE`."""
    if func is _GETITEM:
        return _makes_view(args[1])
    return func not in _COUNTING or (type(args[0]) is Tensor and args[0].dtype in _INTEGERS)


def _makes_view(index: Any) -> bool:
    """Whether an index makes a view, which is to its tensor what its graph node says."""
    return type(index) in _VIEWING or (type(index) is tuple and all(type(part) in _VIEWING for part in index))


def is_exact(region: Keeper, func: Callable, args: tuple) -> bool:
    """Return whether what ``func`` saves must stay as it is."""
    if func in HARMLESS:
        return False
    if func in _RECURRENT:
        return _copies_weights(args)
    if func in _DIVISIONS or func in _RECIPROCALS:
        denominator = args[0] if func in _RECIPROCALS else args[1] if len(args) > 1 else None
        return _is_large_activation(region, denominator)
    if func in _POWERS:
        # x^2 saves a factor of its gradient, 2x; every other power is singular or steeper in what it saves.
        return not (len(args) > 1 and isinstance(args[1], int | float) and args[1] in (0, 1, 2))
    if isinstance(func, _OPERATORS):
        return _is_exact_operator(region, func, args)
    return is_of_torch(func)


def _is_exact_operator(region: Keeper, func: Callable, args: tuple) -> bool:
    """The same for an operator of ``torch.ops``: torch's own is the function of its name, others are not torch's."""
    namespace, name = str(func).split(".")[:2]
    if namespace != "aten":
        return (namespace, name) in _EXACT_OPERATORS
    function = getattr(torch, name, None) or getattr(Tensor, name, None) or getattr(F, name, None)
    return not callable(function) or is_exact(region, function, args)


def is_of_torch(func: Callable) -> bool:
    """Return whether a function is one of torch's: the methods that are compiled say no module."""
    module = getattr(func, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] == "torch"


def _copies_weights(args: tuple) -> bool:
    """Whether a recurrent layer has its weights copied: by autocast, or because they are not in one storage."""
    weights = [x for x in tensors_in(args) if is_parameter(x) and x.is_cuda]
    if not weights:
        return False
    return is_any_autocast_enabled() or len({storage_address(weight) for weight in weights}) > 1


def _is_large_activation(region: Keeper, x: Any) -> bool:
    return is_activation(x) and x.numel() >= region.settings.min_numel and not region.is_weight(x)
