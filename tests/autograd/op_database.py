"""Torch's own database of operators, as calls that run plain and inside a region.

Its small samples run with ``min_numel=0``, which packs each tensor, and again larger at the default ``min_numel``
where the op takes them: with larger sizes S, M and L, and with tensors of the first one's shape tiled.
"""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from brevact.autograd import BackwardSettings, region
from brevact.autograd.region.settings import DEFAULT_MIN_NUMEL
from tests.autograd.database_laws import Outcome, dense, loss_of

try:
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal.opinfo import core

    OPS = [op for op in database.op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")]
except ImportError as error:  # torch's private names move, and its tests need `expecttest`
    MISSING: str | None = f"torch's operator database cannot be imported: {error}"
    OPS = []
else:
    MISSING = None

#: (S, M, L) with which a tensor of three dimensions, one of two, and one of one dimension, has 4096 elements or more.
_LARGER = ({"S": 17, "M": 18, "L": 20}, {"S": 66, "M": 67, "L": 68}, {"S": 4100, "M": 4100, "L": 4100})
#: A sample with more elements, or with more in its result, is no use: the ops of linear algebra take seconds for it.
_MOST_NUMEL, _MOST_RESULTS = 2**15, 2**22
#: Kinds of the first tensor and of the others: variables, activations, weights.
KINDS = ("leaf", "activation", "parameter", "parameters beside an activation")


class Variant(NamedTuple):
    name: str
    call: Callable[..., Any]
    is_inplace: bool = False


class Sample(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any] = lambda out: out

    @property
    def tensors(self) -> list[Tensor]:
        leaves = tree_flatten((self.args, self.kwargs))[0]
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    @property
    def is_large(self) -> bool:
        """Whether a tensor is packed at the default settings."""
        return any(x.numel() >= DEFAULT_MIN_NUMEL for x in self.tensors)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def variants(op: Any) -> list[Variant]:
    """Return the function, the method, the operator and the in-place variants of an op, under each of its names."""
    found: dict[Any, Variant] = {}
    for name, alias in ((op.name, op), *((alias.name, alias) for alias in op.aliases)):
        if isinstance(alias, type(op)):
            forms = (alias.op, alias.method_variant), (alias.inplace_variant, alias.inplace_operator_variant)
            operator = alias.operator_variant
        else:
            forms, operator = ((alias.op, alias.method_variant), (alias.inplace_variant,)), None
        for form in (*forms[0], operator):
            if callable(form):
                found.setdefault(form, Variant(f"{name} as {getattr(form, '__qualname__', form)}", form))
        for form in forms[1]:
            if callable(form):
                found.setdefault(form, Variant(f"{name} in place as {getattr(form, '__qualname__', form)}", form, True))
    return list(found.values())


def samples(op: Any, most: int | None = None) -> list[Sample]:
    def make() -> list[Sample]:
        found = op.sample_inputs_func(op, "cpu", torch.float32, True)  # `sample_inputs` walks the stack for each one
        return [Sample((x.input, *x.args), x.kwargs, x.output_process_fn_grad) for x in itertools.islice(found, most)]

    return _quietly(make)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _regular(*shape: int) -> Tensor:
    """A matrix, of these sizes or reshaped to them, whose inverse is no larger than 1."""
    n = math.isqrt(math.prod(shape))
    return (torch.randn(n, n) / (4 * n**0.5) + 2 * torch.eye(n)).view(shape).requires_grad_()


def _factors(*shape: int) -> tuple[Tensor, Tensor]:
    factors, pivots = torch.linalg.lu_factor(_regular(*shape).detach())
    return factors.requires_grad_(), pivots


#: Arguments of ops whose samples have sizes that are fixed or belong to one another.
_OWN_LARGE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "broadcast_to": lambda: (_random(1, 4100), (2, 4100)),
    "grid_sampler_2d": lambda: (_random(2, 3, 30, 30), (_random(2, 50, 50, 2).sigmoid() * 2 - 1), 0, 0, False),
    "linalg.lu_solve": lambda: (*_factors(66, 66), _random(66, 66)),
    "linalg.solve": lambda: (_regular(66, 66), _random(66, 66)),
    "linalg.solve_ex": lambda: (_regular(66, 66), _random(66, 66)),
    "linalg.tensorinv": lambda: (_regular(8, 9, 72),),
    "linalg.tensorsolve": lambda: (_regular(8, 9, 72), _random(8, 9)),
    "lu_solve": lambda: (_random(66, 66), *_factors(66, 66)),
    "nn.functional.grid_sample": lambda: (_random(2, 3, 30, 30), _random(2, 50, 50, 2).sigmoid() * 2 - 1),
    "tensordot": lambda: (_random(66, 67), _random(67, 66), 1),
    "triangular_solve": lambda: (_random(66, 66), _regular(66, 66)),
}


def larger_samples(op: Any, most: int = 4) -> list[Sample]:
    if name_of(op) in _OWN_LARGE:
        return [Sample(_quietly(_OWN_LARGE[name_of(op)]), {})]
    found: list[Sample] = []
    for sizes in _LARGER:
        with _sizes(sizes):
            try:
                large = _quietly(lambda: _large(op.sample_inputs_func(op, "cpu", torch.float32, True), most))
            except Exception:  # a sample function that has other sizes fixed; the sample is made larger below
                continue
        found += [sample for sample in large if _is_accepted(op, sample)]
        if len(found) >= most:
            return found[:most]
    tiled = (_tiled(sample) for sample in samples(op))
    accepted = (x for x in tiled if x is not None and _is_accepted(op, x))
    return [*found, *itertools.islice(accepted, most - len(found))]


#: Values that take the range of a bucket: heavy tails, one of 512, and a quarter of the elements that is masked.
WIDE = ("Student", 50.0, 200.0, 1000.0, -30.0, -100.0, -1e4, -math.inf)


def with_wide_values(sample: Sample, values: str | float, *, is_positive: bool) -> tuple[Sample, list[Tensor | None]]:
    """Return a sample of such values in its large tensors, and which elements of each tensor are odd."""
    odd: list[Tensor | None] = []

    def widen(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad):
            return x
        odd.append(None)
        if x.numel() < DEFAULT_MIN_NUMEL // 4 or x.layout is not torch.strided:
            return x
        generator = torch.Generator().manual_seed(x.numel() + len(odd))
        y = torch.randn(x.shape, generator=generator)
        if isinstance(values, str):
            y /= (torch.randn(2, *x.shape, generator=generator).square().sum(0) / 2).sqrt()
        else:
            where = torch.rand(x.shape, generator=generator) < 0.25
            if values > 0:
                where = (torch.arange(x.numel()) % 512 == 0).view(x.shape)
            y[where], odd[-1] = values, where
        return (y.abs() if is_positive else y).to(x.dtype).requires_grad_()

    args, kwargs = tree_map(widen, (sample.args, sample.kwargs))
    return Sample(args, kwargs, sample.process), odd


def _is_accepted(op: Any, sample: Sample) -> bool:
    """Whether torch takes a sample that was made larger, gives it gradients, and a result that is not huge."""
    try:
        outcome = run(variants(op)[0], sample, "activation", None)
    except Exception:
        return False
    return bool(outcome.grads) and sum(x.numel() for x in outcome.outputs) <= _MOST_RESULTS


def _large(found: Iterator[Any], most: int) -> list[Sample]:
    large: list[Sample] = []
    for x in itertools.islice(found, 64):
        sample = Sample((x.input, *x.args), x.kwargs, x.output_process_fn_grad)
        numel = sum(tensor.numel() for tensor in sample.tensors)
        if sample.is_large and numel <= _MOST_NUMEL:
            large.append(sample)
        if numel > 4 * _MOST_NUMEL or len(large) >= most:
            break
    return large


def _tiled(sample: Sample) -> Sample | None:
    first = next((x for x in sample.tensors if x.dim() and x.numel()), None)
    if first is None or first.layout is not torch.strided:
        return None
    times = -(-DEFAULT_MIN_NUMEL // first.numel())

    def tile(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape != first.shape:
            return x
        return x.detach().repeat(times, *(1 for _ in x.shape[1:])).requires_grad_(x.requires_grad)

    return Sample(*tree_map(tile, (sample.args, sample.kwargs)), sample.process)


@contextmanager
def _sizes(sizes: dict[str, int]) -> Iterator[None]:
    names = ("linalg", "special", "signal", "fft", "_masked", "sparse", "nested")
    modules = [database, core]
    modules += [importlib.import_module(f"torch.testing._internal.opinfo.definitions.{name}") for name in names]
    with ExitStack() as stack:
        for module in modules:
            for name, size in sizes.items():
                if isinstance(getattr(module, name, None), int):
                    stack.enter_context(mock.patch.object(module, name, size))
        yield


def _quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return make()


def run(
    variant: Variant,
    sample: Sample,
    kind: str,
    settings: BackwardSettings | None,
    seed: int = 0,
    *,
    twice: bool = False,
    in_region: bool = False,
    backward: Callable[..., Any] = torch.autograd.grad,
) -> Outcome:
    """Call an op inside a region, or plain, and differentiate a weighted sum of its results.

    ``twice``: also of its gradients, in a region if ``in_region``. ``backward`` replaces ``torch.autograd.grad``.
    """
    leaves: list[Tensor] = []

    def enter(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not (x.is_floating_point() and x.requires_grad):
            return x.detach().clone() if x.layout is torch.strided else x.detach()
        leaf = x.detach().clone().requires_grad_()
        leaves.append(leaf)
        if kind == "leaf" and not variant.is_inplace:
            return leaf
        if kind == "parameter" or (kind.startswith("parameters beside") and len(leaves) > 1):
            leaves[-1] = nn.Parameter(x.detach().clone())
            return leaves[-1] if not variant.is_inplace else leaves[-1].clone()
        return leaf.clone()

    args, kwargs = tree_map(enter, (sample.args, sample.kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        if settings is None:
            out = variant.call(*args, **kwargs)
        else:
            with region(settings):
                out = variant.call(*args, **kwargs)
        out = sample.process(out)
        outputs = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        scale = sum(x.numel() for x in outputs if x.requires_grad) ** 0.5  # the weights are 1 on average
        loss = loss_of(outputs)
        grads: list[Tensor | None] = []
        if loss is not None:
            with region(settings) if in_region and settings is not None else nullcontext():
                grads = list(backward(loss, leaves, allow_unused=True, create_graph=twice))
            penalty = loss_of([x for x in grads if x is not None]) if twice else None
            if penalty is not None:
                grads += torch.autograd.grad(penalty, leaves, allow_unused=True)
    return Outcome(
        [dense(x.detach()) for x in outputs], [None if x is None else dense(x.detach()) for x in grads], scale
    )
