"""Lossless gradients are torch's to the last bit, in its strides, so that the next op adds in the same order."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

import brevact
from brevact import BackwardSettings, LosslessBackward
from brevact.autograd import region
from tests.autograd import ops
from tests.autograd.database_laws import are_same
from tests.autograd.op_database import MISSING, OPS, Sample, name_of, samples, variants


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _reversed(x: Tensor) -> Tensor:
    dims = list(range(x.dim()))[::-1]
    return x.permute(dims).contiguous().permute(dims)


#: Tensors of the same sizes in other strides, if they have two dimensions or more.
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": lambda x: x.mT.contiguous().mT,
    "channels_last": _channels_last,
    "reversed": _reversed,
    "expanded": lambda x: x[:1].contiguous().expand(x.shape),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}
#: As well, of the gradient that `sum` hands on: one number.
OF_GRADIENTS = {**ORDERS, "of a sum": lambda x: x.reshape(-1)[:1].view([1] * x.dim()).expand(x.shape)}
ALL_PAIRS = list(itertools.product(ORDERS, OF_GRADIENTS))
#: Two of them show most faults.
SOME_PAIRS = [
    *(("contiguous", "transposed"), ("transposed", "contiguous"), ("reversed", "of a sum")),
    *(("channels_last", "reversed"), ("expanded", "reversed"), ("with gaps", "channels_last")),
    ("contiguous", "contiguous"),
]
LOSSLESS = BackwardSettings(brevact.quantizer(LosslessBackward), min_numel=0)
SMALL = BackwardSettings(brevact.quantizer(LosslessBackward))


def lay(x: Tensor, how: str) -> Tensor:
    return OF_GRADIENTS[how](x) if x.dim() > 1 and x.numel() else x


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Strides, 0 where a dimension has one element; those of an empty tensor say nothing."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)) * bool(x.numel())


class Step(NamedTuple):
    """Strides of results, the gradients that reach the inputs of the op, with their strides, and those of leaves."""

    results: list[tuple[int, ...]]
    strides: list[tuple[int, tuple[int, ...]]]
    values: list[Tensor]
    grads: list[Tensor | None]


def run(
    call: Callable[..., Any], inputs: list[Tensor], settings: BackwardSettings | None, of_inputs: str, of_grads: str
) -> Step:
    """Call an op with the inputs in these strides, and hand it gradients in these."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
    for parameter in parameters:
        parameter.grad = None
    seen: list[tuple[int, Tensor]] = []

    def enter(place: int, leaf: Tensor) -> Tensor:
        x = lay(leaf * 1, of_inputs)
        x = x.clone() if x.is_contiguous() else x  # never the leaf's own gradient
        x.register_hook(lambda grad: None if grad is None else seen.append((place, grad.detach())))
        return x

    torch.manual_seed(0)
    entered = [enter(place, leaf) for place, leaf in enumerate(leaves)]
    if settings is None:
        out = call(*entered)
    else:
        with region(settings):
            out = call(*entered)
    results = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor) and x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grads = [lay(torch.randn(x.shape, generator=generator).to(x.dtype), of_grads) for x in results]
    torch.autograd.backward(results, grads)
    seen.sort(key=lambda pair: pair[0])
    strides = [(place, strides_of(grad)) for place, grad in seen]
    return Step(
        [strides_of(x) for x in results], strides, [grad for _, grad in seen], [x.grad for x in (*leaves, *parameters)]
    )


def differences(
    call: Callable[..., Any],
    inputs: list[Tensor],
    settings: BackwardSettings,
    pairs: list[tuple[str, str]],
    reset: Callable[[], None] = lambda: None,
) -> tuple[list[str], int]:
    """Return in which strides of inputs and gradients a region differs from torch, and how many of them torch takes."""
    found, count = [], 0
    for pair in pairs:
        try:
            reset()
            plain = run(call, inputs, None, *pair)
        except (RuntimeError, NotImplementedError):  # in place of an expanded tensor; a layer that wants dense ones
            continue
        count += 1
        reset()
        step = run(call, inputs, settings, *pair)
        if (step.results, step.strides) != (plain.results, plain.strides):
            found.append(f"{pair}: {step.strides} in place of {plain.strides}")
        elif not all(
            are_same(a, b) for a, b in zip([*step.values, *step.grads], [*plain.values, *plain.grads], strict=True)
        ):
            found.append(f"{pair}: other values")
    return found, count


def check_row(op: ops.Op, settings: BackwardSettings, pairs: list[tuple[str, str]]) -> None:
    torch.manual_seed(0)
    call, x = op.make(), torch.randn(op.shape)
    state = {k: v.clone() for k, v in call.state_dict().items()} if isinstance(call, nn.Module) else {}

    def reset() -> None:
        if state:
            call.load_state_dict(state)

    found, count = differences(call, [x], settings, pairs, reset)
    assert not found
    assert count >= len(pairs) / 3


@pytest.mark.parametrize("op", ops.ALL, ids=lambda op: op.name)
def test_lossless_gradients_have_the_bits_and_strides_of_torch(op):
    check_row(op, LOSSLESS, SOME_PAIRS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", ops.ALL, ids=lambda op: op.name)
def test_lossless_gradients_have_the_strides_of_torch_in_all_strides(op):
    check_row(op, LOSSLESS, ALL_PAIRS)


def check_database(op: Any, settings: BackwardSettings, most: int, pairs: list[tuple[str, str]]) -> None:
    found = sorted(samples(op, most=6), key=lambda sample: -sum(x.numel() for x in sample.tensors))[:most]
    call = variants(op)[0].call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in found:
            inputs = [x for x in sample.tensors if x.requires_grad and x.layout is torch.strided and not x.is_nested]
            assert not differences(lambda *xs, s=sample: _call(call, s, xs), inputs, settings, pairs)[0]


def _call(call: Callable[..., Any], sample: Sample, inputs: tuple[Tensor, ...]) -> Any:
    rest = iter(inputs)

    def enter(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point() and x.requires_grad and x.layout is torch.strided and not x.is_nested:
            return next(rest)
        return x.detach().clone() if x.layout is torch.strided else x.detach()

    args, kwargs = tree_map(enter, (sample.args, sample.kwargs))
    return sample.process(call(*args, **kwargs))


in_database = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@in_database
@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_lossless_gradients_of_the_database_have_the_strides_of_torch(op):
    check_database(op, LOSSLESS, 1, SOME_PAIRS[:2])


@in_database
@pytest.mark.exhaustive
@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_lossless_gradients_of_the_database_have_the_strides_of_torch_in_all_strides(op):
    check_database(op, LOSSLESS, 3, ALL_PAIRS)
    check_database(op, SMALL, 3, SOME_PAIRS)


@pytest.mark.parametrize(
    "function", [lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduction="none"), torch.exp]
)
@pytest.mark.parametrize("part", [lambda x: x[:, 1], lambda x: x.transpose(1, 2)[:, :, 0], lambda x: x[..., :3]])
def test_small_views_are_kept_in_their_strides(function, part):
    x = torch.randn(2, 3, 39, 5)

    def gradient(settings: BackwardSettings | None) -> Tensor:
        leaf = x.clone().requires_grad_()
        with region(settings):
            out = function(part(leaf * 1))
        return torch.autograd.grad(out, leaf, torch.linspace(-1, 1, out.numel()).view(out.shape))[0]

    settings = BackwardSettings(brevact.quantizer(LosslessBackward))
    assert x.numel() < settings.min_numel
    assert torch.equal(gradient(settings), gradient(None))


@pytest.mark.parametrize(
    "op", [op for op in ops.ALL if len(op.shape) == 4 and "unbatched" not in op.name], ids=lambda op: op.name
)
def test_strides_of_gradients_without_elements_are_torchs(op):
    """A batch of no images, channels last, with gradients in either order."""
    function = op.make()
    last = torch.channels_last
    for order in (torch.contiguous_format, last):
        found = []
        for chosen in (None, LOSSLESS, SMALL):
            leaf = torch.randn(0, *op.shape[1:]).contiguous(memory_format=last).requires_grad_()
            x, seen = leaf * 1, []
            x.register_hook(lambda grad, seen=seen: seen.append(grad.stride()))
            with region(chosen):
                try:
                    out = function(x)
                except (RuntimeError, ValueError, IndexError) as error:
                    found.append(type(error))
                    continue
            out.backward(torch.zeros(out.shape).contiguous(memory_format=order) if out.dim() == 4 else out.detach())
            found.append((out.stride(), seen))
        assert found[0] == found[1] == found[2]
