"""Laws of every op in a region: the forward is untouched, the backward is the formula on decoded tensors."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from brevact.autograd import BackwardSettings, SaveMode, region
from brevact.quantizers import PackedActivation, Rounding
from tests.autograd import ops
from tests.autograd.measuring import EXACT_VALUES, Mirrored, run_op, settings, watch_saved

by_name = {"ids": lambda op: op.name}


def of_type(function, dtype: torch.dtype):
    return function.to(dtype) if isinstance(function, nn.Module) else function


def assert_near(grads: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype, roundings: int) -> None:
    """Check gradients against torch's, within some roundings to a type, relative to the largest entry."""
    tolerance = roundings * torch.finfo(dtype).eps
    for grad, reference in zip(grads, expected, strict=True):
        assert grad.shape == reference.shape and grad.dtype == reference.dtype
        torch.testing.assert_close(grad, reference, rtol=tolerance, atol=tolerance * reference.abs().max().item())


@pytest.mark.parametrize("op", ops.ALL, **by_name)
def test_forward_is_bit_equal_and_backward_is_the_formula_on_what_is_stored(op):
    """Gradients are torch's where 32 bits store each tensor exactly, and masks and indices are exact at one bit."""
    function, x = op.make(), torch.randn(op.shape)
    plain, packed, deferred = (copy.deepcopy(function) for _ in range(3))
    expected_out, expected = run_op(op, plain, x, None)
    out, grads = run_op(op, packed, x, settings())
    assert torch.equal(out, expected_out)
    assert out.stride() == expected_out.stride()
    if isinstance(function, nn.Module):  # running statistics as well
        for key, value in plain.state_dict().items():
            assert torch.equal(packed.state_dict()[key], value), key
    _, late = run_op(op, deferred, x, settings(save_mode=SaveMode.QUANTIZE_ON_BACKWARD))
    assert all(map(torch.equal, late, grads))
    if op.stored in ("exact", "nothing"):
        _, (grad,) = run_op(op, copy.deepcopy(function), x, settings(bit_width=1))
        torch.testing.assert_close(grad, expected[0], rtol=2 * torch.finfo(x.dtype).eps, atol=0)
    _, grads = run_op(op, function, x, EXACT_VALUES)
    assert_near(grads, expected, x.dtype, 64)  # sums of some hundred products in another order


MAPS = [op for op in ops.ALL if len(op.shape) == 4]


@pytest.mark.parametrize("op", ops.ALL, **by_name)
def test_other_types_run_as_in_torch(op):
    for dtype in (torch.float64, torch.bfloat16, torch.float16) if op in MAPS else (torch.float64,):
        torch.manual_seed(0)
        function, x = of_type(op.make(), dtype), torch.randn(op.shape).to(dtype)
        expected_out, expected = run_op(op, copy.deepcopy(function), x, None)
        out, grads = run_op(op, function, x, EXACT_VALUES)
        assert torch.equal(out, expected_out), dtype
        # Torch rounds the 1 / alpha of this one to float32; to halves there are a handful of roundings.
        rounded = torch.float32 if op.name == "celu" and dtype is torch.float64 else dtype
        assert_near(grads, expected, rounded, 64 if dtype is torch.float64 else 8)


#: Products of two packed tensors, or curved in one: unbiased by two draws that are independent, or at 8 bits nearly.
NOT_AFFINE = (
    *("attention", "attention causal", "squeeze-excitation"),
    *("cross_entropy to distributions", "bce_with_logits weighted"),
)
LINEAR = [op for op in (*ops.PACKED, *ops.FALLBACK) if not (op.is_quadratic or op.name in NOT_AFFINE)]


@pytest.mark.parametrize("op", LINEAR, **by_name)
def test_gradients_are_affine_in_what_is_stored(op):
    """So that unbiased rounding gives an unbiased gradient: errors of both signs cancel."""
    function = op.make()
    x = torch.randn(op.shape)
    _, expected = run_op(op, function, x, None)
    plus, minus = (run_op(op, function, x, BackwardSettings(Mirrored(sign), min_numel=0))[1] for sign in (1, -1))
    eps = 64 * torch.finfo(torch.float32).eps  # sums of some hundred products in another order
    errors = []
    for a, b, reference in zip(plus, minus, expected, strict=True):
        top = reference.abs().max().item()
        torch.testing.assert_close((a.double() + b.double()) / 2, reference.double(), rtol=0, atol=eps * top)
        errors.append((a - reference).abs().max().item() / top)
    assert max(errors) > 100 * eps  # rounded at all: a far value, exact, may be the top


@pytest.mark.parametrize("op", [op for op in ops.PACKED if op.name in (*NOT_AFFINE, "linear", "silu")], **by_name)
def test_stochastic_gradients_are_unbiased(op):
    draws = 200
    function = op.make()
    x = torch.randn(op.shape)
    _, expected = run_op(op, function, x, None)
    samples = [run_op(op, function, x, settings(bit_width=2), seed)[1] for seed in range(draws)]
    for i, reference in enumerate(expected):
        values = torch.stack([grads[i] for grads in samples]).double()
        error = (values.mean(0) - reference).abs()
        # 5 standard errors, and for entries whose rarer level may not have been drawn at all: with p = 16 / draws
        # that happens with probability exp(-16) = 1e-7, and shifts the mean by p times the distance of the levels.
        jump = (values.amax(0) - values.amin(0)).max()
        allowed = 5 * values.std(0) / draws**0.5 + 16 / draws * jump + 1e-5 * reference.abs().max()
        assert (error <= allowed).all(), f"{op.name} gradient {i}: {(error / allowed).max():.2f} of the allowed error"


class _Cut(torch.autograd.Function):
    """Returns no gradient, as Functions do that round or sample."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("op", ops.ALL, **by_name)
def test_no_gradient_stays_none(op):
    """Zeros in its place would be a step of an optimizer: its momentum, and decay of weights."""
    function, leaf = op.make(), torch.randn(op.shape, requires_grad=True)
    leaves = [leaf, *(function.parameters() if isinstance(function, nn.Module) else ())]

    def grads(chosen: BackwardSettings | None) -> list[Tensor | None]:
        with region(chosen):
            out = _Cut.apply(function(leaf.clone()))
        out.sum().backward()
        return [x.grad for x in leaves]

    expected = grads(None)
    assert expected == [None] * len(leaves)
    assert grads(settings()) == grads(EXACT_VALUES) == expected


@pytest.mark.parametrize("op", ops.ALL, **by_name)
def test_stored_bytes_shrink_and_inputs_are_freed(op):
    """What depends on sizes alone stores nothing, and no closure of an op holds its input."""
    function = op.make()
    if isinstance(function, nn.Module) and op.name == "batch_norm2d frozen":
        function.weight.requires_grad_()
    state = list(function.parameters()) + list(function.buffers()) if isinstance(function, nn.Module) else []
    held = {p.untyped_storage().data_ptr() for p in state}
    sizes = []
    for chosen in (None, settings(bit_width=2, bucket_size=512)):
        x = torch.randn(op.shape, requires_grad=True).clone()
        with watch_saved() as saved, region(chosen):
            function(x)
        if chosen is not None and op.stored == "nothing":
            assert saved.tensors == []
            return
        saved.tensors = [t for t in saved.tensors if t.untyped_storage().data_ptr() not in held and t.dim()]
        sizes.append(saved.nbytes)
    bits = 32 * sizes[1] / sizes[0]
    most = {"packed": 4, "scores": 6, "embeddings": 8.5}.get(op.stored, 2.2)
    assert bits <= most, f"{sizes}: {bits:.2f} bits an element"
    if op in ops.PACKED or op in ops.EXACT:
        x = torch.randn(op.shape, requires_grad=True) * 1
        with region(settings()):
            out = function(x)
        storage = weakref.ref(x.untyped_storage())
        del x, saved
        assert storage() is None, out


@pytest.mark.parametrize("op", MAPS, **by_name)
def test_channels_last_strides_and_gradients(op):
    function = op.make()
    function = function.to(memory_format=torch.channels_last) if isinstance(function, nn.Module) else function
    x = torch.randn(op.shape).to(memory_format=torch.channels_last)
    expected_out, expected = run_op(op, copy.deepcopy(function), x, None)
    out, grads = run_op(op, function, x, EXACT_VALUES)
    assert torch.equal(out, expected_out) and out.stride() == expected_out.stride()
    assert_near(grads, expected, x.dtype, 64)  # sums of some hundred products in another order


@pytest.mark.parametrize("op", ops.PACKED, **by_name)
def test_nan_in_the_input_reaches_a_gradient(op):
    function = op.make()
    x = torch.randn(op.shape)
    x.view(-1)[7] = float("nan")
    _, expected = run_op(op, copy.deepcopy(function), x, None)
    _, grads = run_op(op, function, x, settings())
    for grad, reference in zip(grads, expected, strict=True):
        if reference.isnan().any():
            assert grad.isnan().any()


@pytest.mark.parametrize("op", [op for op in ops.ALL if len(op.shape) > 2 and "unbatched" not in op.name], **by_name)
def test_empty_batches(op):
    x = torch.randn((0, *op.shape[1:]))
    function = op.make()
    try:
        expected_out, expected = run_op(op, copy.deepcopy(function), x, None)
    except (RuntimeError, ValueError, IndexError) as error:
        with pytest.raises(type(error)):
            run_op(op, function, x, settings())
        return
    out, grads = run_op(op, function, x, settings())
    torch.testing.assert_close(out, expected_out, rtol=0, atol=0, equal_nan=True)  # the mean of no losses is NaN
    for grad, reference in zip(grads, expected, strict=True):
        assert grad.shape == reference.shape and torch.equal(grad, reference)


def test_frozen_weights_store_no_input():
    for layer in (nn.Conv2d(4, 4, 3), nn.Linear(12, 12), frozen := ops.frozen(nn.BatchNorm2d(4))):
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        x = torch.randn(3, 4, 12, 12, requires_grad=True)
        with watch_saved() as saved, region(settings()):
            out = layer(x * 1)
        assert all(tensor.dtype != torch.uint8 for tensor in saved.tensors)
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad(layer(x).sum(), x)[0])
    assert not frozen.training


def test_packed_tensors_are_those_of_the_quantizer():
    chosen = settings(bit_width=4, rounding=Rounding.NEAREST)
    x, conv = torch.randn(3, 4, 12, 12), nn.Conv2d(4, 6, 3, bias=False)
    packed: PackedActivation = chosen.quantizer.quantize(x)
    with watch_saved() as saved, region(chosen):
        conv(x)
    stored = [t for t in saved.tensors if not saved_is_weight(t, conv)]
    assert len(stored) == 1 and torch.equal(stored[0], packed.buffer)
    assert stored[0].untyped_storage().nbytes() == packed.nbytes


def saved_is_weight(tensor: Tensor, layer: nn.Module) -> bool:
    return tensor.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()
