"""Settings and measuring tools for the tests of regions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from brevact.autograd import BackwardSettings, region
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Part, Rounding, UniformQuantizer
from brevact.quantizers.kernel_ops import flat_memory
from tests.autograd import ops


def settings(bit_width: int = 2, rounding: Rounding = Rounding.STOCHASTIC, bucket_size: int = 64, **options: object):
    quantizer = UniformQuantizer(bit_width=bit_width, rounding=rounding, bucket_size=bucket_size)
    return BackwardSettings(quantizer, **{"min_numel": 0, **options})


EXACT_VALUES = settings(bit_width=32)
NEAREST = settings(rounding=Rounding.NEAREST)
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 0.5, -0.5, 2.0, -3.0])


@dataclass(frozen=True)
class Mirrored:
    """Gives back x + sign * e, with the error e of stochastic rounding at 2 bits by the same seed.

    The mean over both signs is exact for affine functions of the decoded tensors, not for curved ones or products.
    """

    sign: int
    bit_width: int = 2
    is_stochastic: bool = True

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """The values, in double precision."""
        return (Part("values", torch.float64, layout.numel),)

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        layout = Layout.of(x)
        flat = layout.flatten(x.detach())
        rounded = UniformQuantizer(bit_width=self.bit_width, bucket_size=64).quantize(flat, seed).dequantize()
        values = flat.double() + self.sign * (rounded.double() - flat.double())
        return PackedActivation(PackedSpec.of(self, layout), values.view(torch.uint8))

    def decode(self, buffer: Tensor, spec: PackedSpec, target: Tensor, other: Tensor | None = None) -> None:
        values, numel = buffer.view(torch.float64), spec.layout.numel
        if other is not None:
            values = values.to(other.dtype) * flat_memory(other, numel)
        flat_memory(target, numel).copy_(values)


class Saved:
    """Tensors that autograd saved while watched, and their distinct storages."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.tensors}.values())

    def holds(self, x: Tensor) -> bool:
        return any(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in self.tensors)


@contextmanager
def watch_saved() -> Iterator[Saved]:
    saved = Saved()

    def pack(x: Tensor) -> Tensor:
        saved.tensors.append(x.detach())
        return saved.tensors[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


def kept_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes that autograd saves while a function runs, each storage once, without weights and buffers."""
    weights = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    with watch_saved() as saved:
        run()
    saved.tensors = [x for x in saved.tensors if x.untyped_storage().data_ptr() not in weights]
    return saved.nbytes


def run_function(function, x, chosen, parameters=(), seed: int = 0):
    leaf = x.clone().requires_grad_()
    torch.manual_seed(seed)
    with region(chosen):
        out = function(leaf.clone())
    weights = torch.arange(1.0, out.numel() + 1).sin().view(out.shape).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * weights).sum(), [leaf, *parameters])


def assert_as_torch(function, x: Tensor, parameters=(), bit_width: int = 32) -> None:
    """Check output and gradients of function(x) at a bit width against torch's: some roundings."""
    expected_out, expected = run_function(function, x, None, parameters)
    out, grads = run_function(function, x, settings(bit_width=bit_width), parameters)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=0, equal_nan=True)
    assert out.stride() == expected_out.stride()
    eps = 16 * torch.finfo(x.dtype).eps  # some roundings
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=eps, atol=eps, equal_nan=True)


def train_module(module: nn.Module, inputs, chosen, **options):
    """Outputs, gradients of inputs and parameters, and bytes kept for backward of a copy of the module."""
    module, leaves = copy.deepcopy(module).train(), [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(0)
    with watch_saved() as saved, region(chosen):
        outs = module(*(leaf * 1 for leaf in leaves), **options)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None]
    sum((out * torch.linspace(-1, 1, out.numel()).cos().view(out.shape)).sum() for out in outs).backward()
    return outs, [x.grad for x in (*leaves, *module.parameters())], saved


def assert_gradients_close(grads: list[Tensor], expected: list[Tensor]) -> None:
    """Check gradients against torch's, relative to the largest of them."""
    # Sums of some hundred products in another order, relative to the largest gradient.
    top = max(grad.abs().max() for grad in expected)
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=0, atol=64 * torch.finfo(torch.float32).eps * top.item())


def run_op(op: ops.Op, function, x: Tensor, chosen: BackwardSettings | None, seed: int = 0):
    leaf = x.clone().requires_grad_()
    inner = leaf.clone(memory_format=torch.preserve_format)
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    torch.manual_seed(seed)
    with region(chosen):
        out = function(inner)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), [leaf, *parameters])
    return out.detach(), grads


def decoded(x: Tensor, chosen: BackwardSettings) -> Tensor:
    return chosen.quantizer.quantize(x).dequantize()


def run_loss(function: Callable[[Tensor], Tensor], x: Tensor, chosen: BackwardSettings | None, seed: int = 0):
    out, (grad,) = run_function(function, x, chosen, seed=seed)
    return out, grad


def assert_loss_as_torch(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check output and gradient of function(x) at full precision against torch's: some roundings of the largest."""
    expected_out, expected = run_loss(function, x, None)
    out, grad = run_loss(function, x, EXACT_VALUES)
    assert out.dtype == expected_out.dtype and torch.equal(out.nan_to_num(), expected_out.nan_to_num())
    assert grad.dtype == expected.dtype
    eps = 32 * torch.finfo(x.dtype).eps  # some roundings, relative to the largest entry
    top = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    torch.testing.assert_close(grad, expected, rtol=eps, atol=eps * top, equal_nan=True)


def layer_gradients(layer: nn.Module, x: Tensor, chosen, grad_out: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().clone().requires_grad_()
    with region(chosen):
        out = layer(leaf * 1)
    return torch.autograd.grad(out, [leaf, *layer.parameters()], grad_out)
