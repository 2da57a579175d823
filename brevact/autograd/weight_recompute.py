"""Recompute weights that are made from weights whenever backward reads them.

Weight standardization, weight norm, spectral norm, orthogonal weights, LoRA products: between a parameter and the layer
that reads it lie tensors as large as the weight, which torch saves for the layer and for each op on the way. Inside a
region torch's own ops run, and save the parameter and the expression of it (``expressions``) in place of such a
tensor; so does the layer. The gradients are torch's own, of the same values: bit for bit if an op returns the same bits
for the same input.

Only functions whose result depends on their arguments alone (:data:`PURE`) are rerun: none random, none with a state.
Changing the parameter between forward and backward raises, as for a weight that torch saves. Changes that no version
counter sees, of ``parameter.data``, are missed here, too: the weight is then computed from the new value.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd import known_values
from brevact.autograd.call_arguments import bound_call, is_complex, is_plain, tensors_of_call
from brevact.autograd.derived import record_exactly
from brevact.autograd.expressions import TensorFunction
from brevact.autograd.saved import AS_IT_IS, Keeper, Saved
from brevact.autograd.storages import storage_address
from brevact.private_names.of_torch import DisableTorchFunction, is_any_autocast_enabled

_NAMES = (
    *("abs absolute neg negative sign square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan "
      "sinh cosh asin acos atan asinh acosh atanh tanh sigmoid softplus softsign erf erfc erfinv logit relu relu6 gelu "
      "silu elu selu celu leaky_relu hardtanh hardsigmoid hardswish mish logsigmoid tanhshrink hardshrink softshrink "
      "threshold round floor ceil trunc frac clamp clip clamp_min clamp_max positive").split(),
    *("add sub subtract rsub mul multiply div divide true_divide pow maximum minimum fmax fmin lerp where addcmul "
      "addcdiv masked_fill copysign hypot atan2 fmod remainder").split(),
    *("sum mean var std norm vector_norm amax amin max min prod logsumexp softmax log_softmax softmin "
      "cumsum cumprod norm_except_dim normalize layer_norm group_norm rms_norm median quantile").split(),
    *("matmul mm bmm mv dot vdot inner outer ger addmm addmv addr baddbmm addbmm einsum tensordot kron chain_matmul "
      "multi_dot matrix_exp matrix_power householder_product inv inverse solve solve_triangular cholesky det").split(),
    *("cat concat concatenate stack hstack vstack dstack clone contiguous reshape flatten tile repeat "
      "repeat_interleave flip roll rot90 pad tril triu diag diag_embed block_diag index_select gather take_along_dim "
      "zeros_like ones_like full_like new_zeros new_ones new_full interpolate pixel_shuffle pixel_unshuffle").split(),
    *("to type type_as float double half bfloat16").split(),
)  # fmt: skip
_OPERATORS = (*("add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs matmul rmatmul pos mod rmod".split()),)
_HOMES = (torch, Tensor, F, torch.linalg, torch.special)
#: Functions whose result depends on their arguments alone, and which change nothing.
PURE: frozenset[Callable] = frozenset(
    (
        *(getattr(home, name) for name in _NAMES for home in _HOMES if callable(getattr(home, name, None))),
        *(getattr(Tensor, f"__{name}__") for name in _OPERATORS),
        *(getattr(torch, name) for name in ("_weight_norm", "_weight_norm_interface") if hasattr(torch, name)),
        torch.eye,
    )
)
#: Pure without running statistics, their second and third argument.
_BY_STATISTICS = frozenset((F.batch_norm, F.instance_norm))
_NORMS = frozenset((torch.norm, Tensor.norm, torch.linalg.norm))


class _AsInForward(NamedTuple):
    """An op, run by torch's own function in the autocast in which it ran in forward: device type and dtype, or None."""

    compute: TensorFunction
    autocast: tuple[str, torch.dtype] | None

    def __call__(self, *tensors: Tensor) -> Tensor:
        around = nullcontext() if self.autocast is None else torch.autocast(*self.autocast, cache_enabled=False)
        with DisableTorchFunction(), around:
            return self.compute(*tensors)


def remember(region: Keeper, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any, saved: list[Tensor]):
    """Record how a function made a weight, if that saves memory; ``saved``: tensors that autograd saves for it."""
    least = region.settings.min_numel
    if not ((region.is_activation(result) or is_complex(result)) and result.numel() >= least):
        return
    if not _is_pure(func, args, kwargs):
        return
    held, address = {storage_address(x) for x in saved}, storage_address(result)

    def find(x: Tensor) -> Saved | None:  # None for what the result views, and for more tensors to save
        return None if storage_address(x) == address else _source(x, held, least)

    compute = _AsInForward(bound_call(func, args, kwargs), _autocast_of(result))
    record_exactly(compute, tensors_of_call(args, kwargs), result, find)


def _source(x: Tensor, held: set[int], least: int) -> Saved | None:
    """Return an argument's saved form: known, as it is if its storage is ``held`` anyway, or a small copy."""
    known = known_values.find(x)
    if known is not None or not is_plain(x) or x.is_inference():
        return known
    if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or storage_address(x) in held:
        return (x.detach(),), AS_IT_IS
    return ((x.detach().clone(),), AS_IT_IS) if x.numel() < least else None  # torch would not notice its changes


def _is_pure(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    if func in _BY_STATISTICS:
        given = (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
        return all(each is None for each in given)
    if func in _NORMS and _is_of_singular_values(func, args, kwargs):
        return False
    return func in PURE and kwargs.get("out") is None and not kwargs.get("inplace", False)


def _is_of_singular_values(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a norm may use singular values: without gradients torch computes them with other last bits."""
    order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else None))
    return order == "nuc" or (func is torch.linalg.norm and order in (2, -2))


def _autocast_of(x: Tensor) -> tuple[str, torch.dtype] | None:
    kind = x.device.type
    if not (is_any_autocast_enabled() and torch.amp.is_autocast_available(kind)):
        return None
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
