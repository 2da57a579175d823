"""Recompute weights that are made from weights whenever backward reads them.

Weight standardization, weight norm, spectral norm, orthogonal weights, LoRA products: between a parameter and the layer
that reads it lie tensors as large as the weight, which torch saves for the layer and for each op on the way. Inside a
region torch's own ops run, and save the parameter and how the tensor was computed (:class:`Recipe`) in place of such a
tensor; so does the layer. The gradients are torch's own, of the same values: bit for bit if an op returns the same bits
for the same input.

Only functions whose result depends on their arguments alone (:data:`PURE`) are rerun: none random, none with a state.
Changing the parameter between forward and backward raises, as for a weight that torch saves. Changes that no version
counter sees, of ``parameter.data``, are missed here, too: the weight is then computed from the new value.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd import known_values, storage_report
from brevact.autograd.call_arguments import BoundCall, bound_call, is_complex, is_plain, tensors_of_call
from brevact.autograd.expressions import TensorFunction
from brevact.autograd.saved import Decoder, Keeper
from brevact.autograd.storages import storage_address
from brevact.private_names.of_torch import DisableAutocast, DisableTorchFunction, is_any_autocast_enabled

#: Most ops between the parameters and a recomputed tensor: each op on the way recomputes those before it.
MOST_STEPS = 16

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


class _Kept:
    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """One op of a recipe, and the device type and dtype of the autocast in which it ran, or None."""

    compute: TensorFunction
    operands: tuple[_Step | _Kept, ...]
    autocast: tuple[str, torch.dtype] | None = None

    def run(self, values: dict[Any, Tensor]) -> Tensor:
        """Compute the result; add it and those that it needs to ``values``, which holds the saved tensors."""
        if self not in values:
            operands = [each.run(values) if type(each) is _Step else values[each] for each in self.operands]
            with _as_in_forward(self.autocast):
                values[self] = self.compute(*operands)
        return values[self]


@dataclass(frozen=True, slots=True)
class Recipe(Decoder):
    """Decoder of a weight that a step, and those that it reads, recompute from the saved tensors at these places."""

    places: tuple[_Kept, ...]
    step: _Step
    nbytes: int
    allows_double_backward = True

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad(), DisableTorchFunction():
            return self.step.run(dict(zip(self.places, tensors, strict=True)))

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.EXACT, self.nbytes


def remember(region: Keeper, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any, saved: list[Tensor]):
    """Record how a function made a weight, if that saves memory; ``saved``: tensors that autograd saves for it."""
    if not (
        (region.is_activation(result) or is_complex(result))
        and result.numel() >= region.settings.min_numel
        and _is_pure(func, args, kwargs)
    ):
        return
    recipe = _Writer(region, saved).write(func, args, kwargs, result)
    if recipe is not None:
        known_values.register(result, *recipe)


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


class _Writer:
    def __init__(self, region: Keeper, saved: list[Tensor]) -> None:
        self._least = region.settings.min_numel
        self._saved = {storage_address(x) for x in saved}
        self._kept: dict[_Kept, Tensor] = {}
        self._steps: set[_Step] = set()

    def write(
        self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Tensor
    ) -> tuple[tuple[Tensor, ...], Recipe] | None:
        """Return the saved tensors and the recipe; None for views, and recipes that are long or save more tensors."""
        address, operands = storage_address(result), []
        for x in tensors_of_call(args, kwargs):
            found = None if storage_address(x) == address else self._source(x)
            if found is None:
                return None
            operands.append(found)
        step = _Step(bound_call(func, args, kwargs), tuple(operands), _autocast_of(result))
        self._count(step)
        if len(self._steps) > MOST_STEPS:
            return None
        return tuple(self._kept.values()), Recipe(tuple(self._kept), step, result.nbytes)

    def _count(self, step: _Step | _Kept) -> None:
        if type(step) is _Step and step not in self._steps:
            self._steps.add(step)
            for each in step.operands:
                self._count(each)

    def _source(self, x: Tensor) -> _Step | _Kept | None:
        """Return the step or placeholder that gives an argument back; None if there is none."""
        known = known_values.find(x)
        if known is not None:
            return self._known(*known)
        if not is_plain(x) or x.is_inference():
            return None
        if not (isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or storage_address(x) in self._saved):
            if x.numel() >= self._least:
                return None
            x = x.detach().clone()  # torch would not notice its changes
        return self._keep(x.detach())

    def _known(self, tensors: tuple[Tensor, ...], decoder: Any) -> _Step:
        if isinstance(decoder, known_values.View):
            inner = self._known(tensors, decoder.decoder)
            view = BoundCall(torch.as_strided, (Tensor, decoder.shape, decoder.stride, decoder.offset))
            return _Step(view, (inner,))
        if isinstance(decoder, Recipe):
            for place, x in zip(decoder.places, tensors, strict=True):
                if place not in self._kept:
                    self._kept[place] = x
            return decoder.step
        return _Step(lambda *kept: decoder.decode(kept), tuple(self._keep(x) for x in tensors))

    def _keep(self, x: Tensor) -> _Kept:
        """Return a tensor's placeholder; one that an op reads twice has one placeholder."""
        for place, known in self._kept.items():
            if storage_address(known) == storage_address(x) and _view_of(known) == _view_of(x):
                return place
        place = _Kept()
        self._kept[place] = x
        return place


def _view_of(x: Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), x.shape, x.stride(), x.dtype


def _autocast_of(x: Tensor) -> tuple[str, torch.dtype] | None:
    kind = x.device.type
    if not (is_any_autocast_enabled() and torch.amp.is_autocast_available(kind)):
        return None
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def _as_in_forward(autocast: tuple[str, torch.dtype] | None) -> AbstractContextManager[Any]:
    """The autocast in which an op ran; if it ran in none, disable one around the backward pass."""
    if autocast is not None:
        return torch.autocast(autocast[0], autocast[1], cache_enabled=False)
    if is_any_autocast_enabled():
        return DisableAutocast()
    return nullcontext()
