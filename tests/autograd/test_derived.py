"""Tensors that derive from a packed one: no byte of their own, and gradients that are the formula of its values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import StochBackward2bit, StochBackward4bit, StochBackward8bit
from brevact.autograd import SaveMode, current_region, region
from brevact.autograd.deriving import cache as held_outputs
from brevact.autograd.deriving import derived, expressions, known_values
from tests.autograd.measuring import settings, watch_saved

FOUR = settings(bit_width=4)
#: Bytes of :func:`images` packed in 4 bits: codes, and a scale and a minimum for each bucket of 64.
ONE = 4 * 8 * 256 // 2 + 4 * 8 * 256 // 64 * 6
#: (tensor of four dimensions) -> its norm, with a weight and a bias that are neither 1 nor 0.
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: F.batch_norm(x, None, None, *_affine(x.shape[1]), training=True),
    "batch without affine": lambda x: F.batch_norm(x, None, None, training=True),
    "batch, frozen": lambda x: F.batch_norm(x, torch.zeros(8), torch.full((8,), 4.0), *_affine(x.shape[1])),
    "instance": lambda x: F.instance_norm(x, None, None, *_affine(x.shape[1])),
    "group": lambda x: F.group_norm(x, 4, *_affine(x.shape[1])),
    "layer": lambda x: F.layer_norm(x, x.shape[-1:], *_affine(x.shape[-1])),
    "layer over two": lambda x: F.layer_norm(x, x.shape[-2:]),
    "rms": lambda x: F.rms_norm(x, x.shape[-1:], _affine(x.shape[-1])[0]),
}
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x, inplace=True),
    "silu, positional": lambda x: F.silu(x, True),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "sigmoid in place": torch.sigmoid_,
    "tanh": Tensor.tanh,
    "elu": lambda x: F.elu(x, 0.5),
    "softplus": lambda x: F.softplus(x, beta=2),
    "power": lambda x: x.pow(3),
}
#: Written out, as the models of Hugging Face have them.
WRITTEN_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh GELU": lambda x: 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "gate of itself": lambda x: x * F.silu(x),
    "scalars": lambda x: (2 - (x * 3 + 1) / 4).neg().float(),
    "scalars in place": lambda x: x.mul_(3).add_(1).div_(4),
    "scale a channel": lambda x: x * (torch.arange(8.0) + 1).view(8, 1, 1),
}


def _affine(channels: int) -> tuple[Tensor, Tensor]:
    return torch.linspace(0.5, 2, channels, requires_grad=True), torch.linspace(-1, 1, channels, requires_grad=True)


def images(requires_grad: bool = True) -> Tensor:
    scales = torch.logspace(-1, 1, 8).view(8, 1, 1)
    return (torch.randn(4, 8, 16, 16) * scales + scales).requires_grad_(requires_grad)


def normalized(chosen=FOUR, norm: str = "batch") -> tuple[Tensor, Tensor]:
    """Return the output of a norm in the active region, and the decoded output."""
    y = NORMS[norm](images() * 1)
    known = known_values.find(y, chosen)
    assert known is not None
    return y, known[1].decode(known[0])


def vector_jacobian_product(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(function(leaf * 1), leaf, grad)[0]


def is_as_good(found: Tensor, expected: Tensor) -> bool:
    """Whether two results agree but for the roundings of a few ops in float32."""
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("norm", NORMS)
def test_the_output_of_a_norm_decodes_within_a_step(norm):
    chosen = settings(bit_width=8)
    with region(chosen):
        y, decoded = normalized(chosen, norm)
    assert decoded.shape == y.shape and decoded.stride() == y.stride() and decoded.dtype == y.dtype
    # x^ has a range below 2 sqrt(N) for the N = 1024 elements of a group, a step 1/255 of it; weights are below 2
    assert (decoded - y).abs().max() < 2 * 2 * 32 / 255
    assert not torch.equal(decoded, y)


@pytest.mark.parametrize("function", {**SMOOTH, **WRITTEN_OUT})
def test_gradients_are_the_formula_of_the_decoded_tensor(function):
    function = {**SMOOTH, **WRITTEN_OUT}[function]
    with watch_saved() as saved, region(FOUR):
        y, decoded = normalized()
        out = function(y)
        grad = torch.randn(out.shape)
        known = known_values.find(out, FOUR)
    packed = {x.data_ptr(): x.nbytes for x in saved.tensors if x.dtype is torch.uint8}
    assert list(packed.values()) == [ONE] and all(x.dtype is torch.uint8 or x.numel() <= 16 for x in saved.tensors)
    if y is not out:  # of one that is overwritten there is no gradient to ask for
        expected = vector_jacobian_product(function, decoded, grad)
        assert is_as_good(torch.autograd.grad(out, y, grad)[0], expected)
    assert known is not None
    assert is_as_good(known[1].decode(known[0]), function(decoded.clone()))
    assert known[1].decode(known[0]).stride() == out.stride()


def test_hardswish_is_linear_in_what_is_rounded_on_each_side_of_its_jumps():
    with region(FOUR):
        y, decoded = normalized()
        inside, is_above = (y > -3) & (y < 3), y >= 3
        out = F.hardswish(y)
    slope = torch.where(inside, decoded / 3 + 0.5, is_above.float())
    assert is_as_good(torch.autograd.grad(out.sum(), y)[0], slope)


@pytest.mark.parametrize("value", [-3.0, 3.0, -torch.inf, torch.inf, torch.nan])
def test_hardswish_is_exact_at_its_jumps_and_at_what_is_not_finite(value):
    x = torch.full((512,), value, requires_grad=True)
    (expected,) = torch.autograd.grad(F.hardswish(x * 1).sum(), x)
    with region(FOUR):
        out = F.hardswish(x * 1)
    assert torch.allclose(torch.autograd.grad(out.sum(), x)[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", ["silu in place", "silu, positional", "sigmoid in place", "scalars in place"])
def test_in_place_gradients_reach_what_is_below(function):
    """The gradient of the norm's bias is the sum of that of its output, which is no leaf once it is overwritten."""
    function = {**SMOOTH, **WRITTEN_OUT}[function]
    bias = torch.zeros(8, requires_grad=True)
    with region(FOUR):
        y = F.batch_norm(images() * 1, None, None, None, bias, training=True)
        known = known_values.find(y, FOUR)
        decoded = known[1].decode(known[0])
        out = function(y)
        grad = torch.randn(out.shape)
    expected = vector_jacobian_product(function, decoded, grad).sum((0, 2, 3))
    assert is_as_good(torch.autograd.grad(out, bias, grad)[0], expected)


@pytest.mark.parametrize("act", ["silu", "gelu", "relu", "none"])
@pytest.mark.parametrize("norm", ["batch", "group", "batch, frozen"])
def test_a_convolution_behind_reads_the_same_tensor(act, norm):
    function = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "none": lambda x: x}[act]
    weight = torch.randn(4, 8, 3, 3, requires_grad=True)
    with watch_saved() as saved, region(FOUR):
        y, decoded = normalized(norm=norm)
        mask = y > 0
        out = F.conv2d(function(y), weight, padding=1)
    values = decoded * mask if act == "relu" else function(decoded)
    grad = torch.randn(out.shape)
    found = torch.autograd.grad(out, weight, grad)[0]
    assert is_as_good(found, torch.nn.grad.conv2d_weight(values, weight.shape, grad, padding=1))
    codes = {x.data_ptr(): x.nbytes for x in saved.tensors if x.dtype is torch.uint8}
    assert sum(codes.values()) == ONE + (y.numel() // 8 if act == "relu" else 0)


_SUMS = {
    "one": lambda y, other, packed: y,
    "with a packed tensor": lambda y, other, packed: y + packed,
    "of a packed tensor": lambda y, other, packed: torch.add(packed, y),
    "of two": lambda y, other, packed: y + other,
    "in place": lambda y, other, packed: (y * 1).add_(packed) if y.requires_grad else y,
    "doubled": lambda y, other, packed: y + y,
    "weighted": lambda y, other, packed: torch.add(y, packed, alpha=0.5),
    "with one number a channel": lambda y, other, packed: y + packed[:1, :, :1, :1],
}


@pytest.mark.parametrize("act", [F.relu_, lambda x: x, lambda x: F.leaky_relu(x, 0.1)])
@pytest.mark.parametrize(
    ("dtype", "memory_format", "bucket_size"),
    [
        (torch.float32, torch.channels_last, 512),
        (torch.float32, torch.contiguous_format, 64),
        (torch.bfloat16, torch.contiguous_format, 512),
    ],
)
def test_sums_and_masks_of_large_tensors_are_decoded_in_one_pass(dtype, memory_format, bucket_size, act, monkeypatch):
    """Bits equal those of separate passes; tensors that other readers share are not written to."""
    torch.manual_seed(0)
    tensors = [torch.randn(4, 8, 9, 15).to(dtype, memory_format=memory_format).requires_grad_() for _ in range(3)]
    weights = [torch.randn(4, 8, 3, 3, dtype=dtype, requires_grad=True) for _ in range(3)]
    gains = [torch.randn(8, dtype=dtype, requires_grad=True) for _ in range(4)]

    def run(add: Callable) -> list[Tensor]:
        torch.manual_seed(1)
        with region(settings(bucket_size=bucket_size)):
            x, z, packed = (tensor * 1 for tensor in tensors)
            y = F.batch_norm(x, None, None, *gains[:2], training=True)
            other = F.batch_norm(z, None, None, *gains[2:], training=True)
            out = F.conv2d(packed, weights[0], padding=1) + F.conv2d(y, weights[1], padding=1)
            out = out + F.conv2d(act(add(y, other, packed)), weights[2], padding=1)
        wanted = [*tensors, *weights, *gains]
        total = out.square().sum()
        return [
            x for _ in range(2) for x in torch.autograd.grad(total, wanted, retain_graph=True, materialize_grads=True)
        ]

    with monkeypatch.context() as patched:
        patched.setattr(expressions, "_in_one_pass", lambda *_: None)
        expected = [x for add in _SUMS.values() for x in run(add)]
    monkeypatch.setattr(held_outputs, "MOST_HELD", 0)
    found = [x for add in _SUMS.values() for x in run(add)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "function",
    [
        F.relu,
        lambda x: F.relu(x, inplace=True),
        lambda x: F.leaky_relu(x, 0.1),
        F.relu6,
        F.hardtanh,
        F.hardsigmoid,
        lambda x: F.prelu(x, torch.full((8,), 0.2)),
        torch.abs,
        lambda x: x.clamp(min=-0.5),
        lambda x: x.clamp(-0.5, 0.7),
        lambda x: x.clamp_max(0.7),
    ],
)
def test_piecewise_linear_functions_have_the_exact_mask(function):
    with region(settings(bit_width=2)):
        y, decoded = normalized(settings(bit_width=2))
        plain = y.detach().clone().requires_grad_()
        out = function(y)
        known = known_values.find(out, settings(bit_width=2))
    values = known[1].decode(known[0])
    slope = torch.autograd.grad(function(plain * 1).sum(), plain)[0]
    expected = function(plain.detach().clone())
    inside = slope != 0  # there the error is that of the decoded tensor, times the slope
    assert torch.allclose(values[inside], (expected + slope * (decoded - plain))[inside], atol=1e-5)
    wrong = values[~inside] != expected[~inside]  # the other bound, where the decoded tensor is nearer to it
    assert wrong.sum() <= 0.2 * wrong.numel()


def test_smooth_functions_need_bits_and_can_be_turned_off():
    def kept(bit_width: int, **options: object) -> int:
        with watch_saved() as saved, region(settings(bit_width=bit_width, **options)):
            F.conv2d(F.silu(NORMS["batch"](images() * 1)), torch.randn(4, 8, 1, 1, requires_grad=True))
        return sum({x.data_ptr(): x.nbytes for x in saved.tensors if x.dtype is torch.uint8}.values())

    one = {bits: 4 * 8 * 256 * bits // 8 + 4 * 8 * 256 // 64 * 6 for bits in (2, 3, 4, 8)}
    assert kept(4) == one[4] and kept(8) == one[8]
    assert kept(2) == 3 * one[2] and kept(3) == 3 * one[3]
    assert kept(2, derive_min_bits=2) == one[2] and kept(4, derive_min_bits=5) == 3 * one[4]
    assert kept(4, derive_min_bits=0) == 3 * one[4]


def test_nothing_derives_for_readers_that_want_more():
    weight = torch.randn(4, 8, 1, 1, requires_grad=True)
    for finer, derives in ((settings(bit_width=8), False), (settings(bit_width=2), True)):
        with region(FOUR):
            y = NORMS["batch"](images() * 1)
        with watch_saved() as saved, region(finer):
            F.conv2d(y, weight)
        assert any(x.nbytes == ONE for x in saved.tensors) == derives


def test_what_a_full_precision_region_reads_is_stored_as_it_is():
    weight = torch.randn(4, 8, 1, 1, requires_grad=True)
    with watch_saved() as saved, region(FOUR):
        y = NORMS["batch"](images() * 1)
        with region(None):
            F.conv2d(y, weight)
    assert saved.holds(y)


def test_products_with_gates_masks_and_weights_store_nothing():
    gate = torch.rand(4, 8, 1, 1, requires_grad=True)
    scale = torch.randn(8, 1, 1, requires_grad=True)
    with watch_saved() as saved, region(FOUR):
        y, decoded = normalized()
        out = F.silu(y) * (gate * 1) * scale
        known = known_values.find(out, FOUR)
    assert all(x.numel() <= 32 for x in saved.tensors if x.dtype is not torch.uint8)
    assert len({x.data_ptr() for x in saved.tensors if x.dtype is torch.uint8}) == 1
    grads = torch.autograd.grad(out, [y, gate, scale], torch.ones_like(out))
    leaves = [x.detach().requires_grad_() for x in (decoded, gate, scale)]
    expected = torch.autograd.grad((F.silu(leaves[0]) * leaves[1] * leaves[2]).sum(), leaves)
    assert all(is_as_good(a, b) for a, b in zip(grads, expected, strict=True))
    assert is_as_good(known[1].decode(known[0]), F.silu(decoded) * gate * scale)


def test_dropout_is_followed():
    with region(settings(bit_width=4)):
        y, decoded = normalized()
        out = F.dropout(y, 0.3)
        known = known_values.find(out, FOUR)
    factor = torch.where(out != 0, 1 / 0.7, 0.0)
    assert is_as_good(known[1].decode(known[0]), decoded * factor)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.permute(0, 2, 3, 1),
        lambda x: x.permute(0, 2, 3, 1).contiguous(),
        lambda x: x.flatten(1),
        lambda x: F.pad(x, (1, 1, 2, 0)),
        lambda x: torch.cat([x, F.silu(x), x[:, :2]], 1),
        lambda x: x.chunk(2, 1)[1],
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(input=x, kernel_size=2),
        lambda x: torch.mean(input=x.unflatten(3, (8, 2)), dim=4),
        lambda x: torch.cat((-x[..., 8:], x[..., :8]), -1),
        lambda x: x * x.sigmoid() + x,
        lambda x: (x * torch.ones(16)) + torch.cat((-x[..., 8:], x[..., :8]), -1) * torch.full((16,), 0.5),  # rotary
    ],
)
def test_moves_views_and_averages_are_followed(move):
    with region(FOUR):
        y, decoded = normalized()
        out = move(y)
        known = known_values.find(out, FOUR)
    assert known is not None
    assert is_as_good(known[1].decode(known[0]), move(decoded))


@pytest.mark.parametrize(
    ("function", "derives"),
    [
        (lambda x: x * torch.ones(16) + torch.cat((-x[..., 8:], x[..., :8]), -1) * torch.full((16,), 0.5), True),
        (lambda x: x - 0.5 * x, True),
        (lambda x: torch.sub(x, x, alpha=2), True),
        (lambda x: torch.cat((x, 2 * x.flip(1)), 1), True),
        (lambda x: x * x.flip(1), False),
        (lambda x: torch.mul(x, x + 1), False),
        (lambda x: x + x * x.flip(1), False),
    ],
    ids=["rotary", "difference", "alpha", "cat", "product", "shifted product", "sum of a product"],
)
def test_two_bits_serve_what_reads_them_twice_where_it_is_linear(function, derives):
    """The errors of one packed tensor that a product multiplies with each other have a mean: they are a bias."""
    two = settings(bit_width=2)
    with region(two):
        y, decoded = normalized(two)
        out = function(y)
        known = known_values.find(out, two)
    assert (known is not None) == derives
    if derives:
        assert is_as_good(known[1].decode(known[0]), function(decoded))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 1:] - x[:, :-1],
        lambda x: x + x.flip(1),
        lambda x: torch.sub(x, x.roll(1, 1), alpha=0.5),
        lambda x: F.relu(x)[:, 1:] - F.relu(x)[:, :-1],
        lambda x: torch.add(x, x, alpha=x.detach()[0, 0, 0, 0]),
    ],
    ids=["difference", "sum", "alpha", "of relu", "alpha that is one of the elements"],
)
def test_sums_of_neighbours_are_stored(function):
    """Where they cancel, the errors that are left are those of a far wider range."""
    for chosen in (settings(bit_width=2), FOUR):
        with region(chosen):
            y, _ = normalized(chosen)
            assert known_values.find(function(y), chosen) is None


def test_maxima_are_picked_where_they_were():
    with region(settings(bit_width=2)):
        y, decoded = normalized(settings(bit_width=2))
        out = F.max_pool2d(F.relu(y), 2)
        known = known_values.find(out, settings(bit_width=2))
    masked = decoded * (y > 0)
    index = F.max_pool2d(F.relu(y.detach()), 2, return_indices=True)[1]
    expected = masked.flatten(2).gather(2, index.flatten(2)).view(index.shape)
    assert torch.equal(known[1].decode(known[0]), expected)


def test_the_slopes_of_rectifiers_train():
    slope = torch.full((8,), 0.2, requires_grad=True)
    with watch_saved() as saved, region(FOUR):
        y, decoded = normalized()
        out = F.prelu(y, slope)
    assert sum({x.data_ptr(): x.nbytes for x in saved.tensors if x.dtype is torch.uint8}.values()) == ONE + 1024
    found = torch.autograd.grad(out, slope, torch.ones_like(out))[0]
    assert is_as_good(found, (decoded * (y <= 0)).sum((0, 2, 3)))


def test_gated_units_keep_the_two_projections_alone():
    gate, up = (torch.randn(64, 96, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, 96, requires_grad=True)
    with watch_saved() as saved, region(FOUR):
        a, b = gate * 1, up * 1
        out = F.linear(F.silu(a) * b, weight)
        one, two = (current_region().find_kept(x) for x in (a, b))
    codes = {x.data_ptr(): x.nbytes for x in saved.tensors if x.dtype is torch.uint8}
    assert sorted(codes.values()) == [64 * 96 * 4 // 8 + 96 * 6] * 2
    grad = torch.randn(out.shape)
    leaves = [x.detach().requires_grad_() for x in (weight, one[1].decode(one[0]), two[1].decode(two[0]))]
    expected = torch.autograd.grad(F.linear(F.silu(leaves[1]) * leaves[2], leaves[0]), leaves, grad)
    found = torch.autograd.grad(out, [weight, a, b], grad)
    assert all(is_as_good(x, y) for x, y in zip(found, expected, strict=True))


def test_a_residual_sum_of_two_is_derived_and_one_of_more_is_stored():
    with region(FOUR):
        first, one = normalized()
        second, two = normalized(norm="group")
        third, _ = normalized(norm="instance")
        total = first + second
        known = known_values.find(total, FOUR)
        assert is_as_good(known[1].decode(known[0]), one + two)
        assert known_values.find(total + third, FOUR) is None


def test_the_bias_is_that_of_the_forward_pass():
    model = nn.Sequential(nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 1))
    brevact.quantize_backward(model, FOUR)
    results = []
    for change in (False, True):
        torch.manual_seed(1)
        out = model(images())
        if change:
            with torch.no_grad():
                model[0].bias.add_(3)
        results.append(torch.autograd.grad(out.square().sum(), model[2].weight)[0])
    assert torch.equal(*results)


def test_a_changed_weight_of_a_norm_raises_as_in_pytorch():
    norm, weight = nn.BatchNorm2d(8), torch.randn(4, 8, 1, 1, requires_grad=True)
    with region(FOUR):
        out = F.conv2d(F.silu(norm(images() * 1)), weight)
    with torch.no_grad():
        norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_tensor_that_changes_is_no_longer_what_it_was():
    with region(FOUR):
        y, _ = normalized()
        view = y[0]
        view.add_(images()[0].detach())
        assert known_values.find(y, FOUR) is None and known_values.find(view, FOUR) is None


READ_TWICE: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "a view of a packed tensor": lambda x, v, w: (F.conv2d(x, v), F.linear(x.flatten(1), w)),
    "the output of a norm of a tensor with gaps": lambda x, v, w: (F.layer_norm(x[..., 1:], (5,)) @ x[..., :5].mT,),
    "a tensor that a function overwrites": lambda x, v, w: (
        F.conv2d(x, v),
        F.linear(F.silu(x, inplace=True).flatten(1), w),
    ),
    "a tensor that is changed afterwards": lambda x, v, w: (F.conv2d(x, v), F.linear(x.mul_(2).flatten(1), w)),
    "an expanded tensor": lambda x, v, w: (F.conv2d(x[:1].expand(2, -1, -1, -1), v), F.linear(x.flatten(1), w)),
    "a tensor of no elements": lambda x, v, w: (F.conv2d(x, v), F.silu(x[:0, :1].expand(-1, 8, -1, -1)).exp()),
    "a norm of an expanded tensor": lambda x, v, w: (F.layer_norm(x[:1].expand(2, -1, -1, -1), (6,)) @ x,),
}


@pytest.mark.parametrize("read", READ_TWICE.values(), ids=READ_TWICE)
def test_both_save_modes_draw_the_same_seeds(read):
    def gradients(mode: SaveMode) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        leaves = [torch.randn(shape, requires_grad=True) for shape in ((2, 8, 6, 6), (4, 8, 3, 3), (5, 288))]
        with region(settings(bit_width=4, save_mode=mode)):
            outs = read(leaves[0] * 1, *leaves[1:])
            last = torch.randn(64, requires_grad=True)
            loss = sum((out.sum() for out in outs), (last.sin() * last.exp()).sum())
        return torch.autograd.grad(loss, [*leaves, last], materialize_grads=True)

    now, later = gradients(SaveMode.SAVE_QUANTIZED), gradients(SaveMode.QUANTIZE_ON_BACKWARD)
    assert all(torch.equal(a, b) for a, b in zip(now, later, strict=True))


def _relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    a, b = (torch.cat([x.flatten().double() for x in each]) for each in (found, expected))
    return ((a - b).norm() / b.norm()).item()


def _block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.SiLU(inplace=True),
        nn.Conv2d(16, 8, 1),
        nn.BatchNorm2d(8),
    )


def _run(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    grad = torch.randn(x.shape, dtype=x.dtype)
    (model(x) * grad).sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return grads


def test_offloaded_and_checkpointed_blocks_have_the_gradients_of_plain_ones():
    model, x = brevact.quantize_backward(_block(), StochBackward4bit, min_numel=0), images()
    plain = _run(model, x)
    with torch.autograd.graph.save_on_cpu():
        assert all(torch.equal(a, b) for a, b in zip(plain, _run(model, x), strict=True))
    again = _run(model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    outer = nn.Sequential(model)
    outer.forward = lambda x: checkpoint(model, x, use_reentrant=False)  # type: ignore[method-assign]
    found = _run(outer, x)
    assert _relative_error(found, plain) < 0.3


def test_a_derived_tensor_holds_neither_itself_nor_its_source():
    with region(FOUR):
        y = NORMS["batch"](images() * 1)
        out = F.silu(y)
        known = known_values.find(out, FOUR)
        codes = weakref.ref(known[0][0])
        storage = weakref.ref(y.untyped_storage())
        loss = F.conv2d(out, torch.randn(4, 8, 1, 1, requires_grad=True)).sum()
    del y, known, out
    gc.collect()
    assert storage() is None and codes() is not None
    loss.backward()
    del loss
    gc.collect()
    assert codes() is None


def test_autocast_and_half_precision():
    model, x = _block(), images()
    brevact.quantize_backward(model, StochBackward8bit, min_numel=0)
    plain = _block()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = _run(model, x), _run(plain, x)
    assert _relative_error(found, expected) < 0.05
    found, expected = _run(model.bfloat16(), x.bfloat16()), _run(plain.bfloat16(), x.bfloat16())
    assert _relative_error(found, expected) < 0.1


def test_values_that_are_not_finite_stay_so():
    x = images(requires_grad=False)
    x[0, 0, 0, 0] = torch.nan
    weight = torch.randn(4, 8, 1, 1, requires_grad=True)
    with region(FOUR):
        out = F.conv2d(F.silu(F.group_norm(x.requires_grad_() * 1, 8)), weight)
    grad = torch.autograd.grad(out.sum(), weight)[0]
    assert grad[:, 0].isnan().all() and grad[:, 1:].isfinite().all()


def relative_errors(function: Callable[[Tensor], Tensor], chosen, make=lambda: torch.randn(4, 8, 16, 16)) -> float:
    """Relative error of the gradient of a weight that multiplies ``function(x)``."""
    torch.manual_seed(0)
    x, grads = make(), []
    weight = torch.randn(3, 8, requires_grad=True)
    for each in (None, chosen):
        with region(each):
            out = function(x.detach().requires_grad_() * 1)
            loss = torch.einsum("kc,c...->k...", weight, out.movedim(1, 0).flatten(1)).tanh().sum()
        grads.append(torch.autograd.grad(loss, weight)[0])
    return ((grads[1] - grads[0]).norm() / grads[0].norm()).item()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x.permute(0, 1, 3, 2), (16,)).flatten(2),
        lambda x: F.instance_norm(x.to(memory_format=torch.channels_last))[:, :, 1:],
        lambda x: F.batch_norm(x.transpose(2, 3), None, None, training=True)[:, :, :, 2:],
        lambda x: F.silu(F.group_norm(x.transpose(2, 3), 4)).transpose(2, 3).flatten(2),
        lambda x: F.layer_norm(x[:1].expand(4, -1, -1, -1), (16,)),
        lambda x: F.silu(F.layer_norm(x, (16,))[:1].expand(4, -1, -1, -1)),
        lambda x: 2 / (F.layer_norm(x, (16,)).abs() + 1),
        lambda x: F.layer_norm(x, (16,)).div(3, rounding_mode="floor"),
    ],
)
def test_orders_of_memory_and_quotients(function):
    assert relative_errors(function, settings(bit_width=8)) < 0.05


@pytest.mark.parametrize(
    "reorder",
    [
        lambda y: y.to(memory_format=torch.channels_last),
        lambda y: F.silu(y.float(memory_format=torch.channels_last)),
        lambda y: y.to(torch.float64, memory_format=torch.channels_last).float(memory_format=torch.contiguous_format),
        lambda y: F.silu(y.contiguous(memory_format=torch.channels_last)),
        lambda y: y.clone(memory_format=torch.channels_last) * 2,
    ],
)
def test_orders_of_memory_that_are_asked_for_where_parts_are_decoded_one_by_one(reorder):
    shape = 4, 8, 96, 96
    assert torch.Size(shape).numel() > held_outputs.MOST_HELD  # so that it is decoded in parts
    error = relative_errors(lambda x: reorder(F.group_norm(x, 8)), settings(bit_width=8), lambda: torch.randn(shape))
    assert error < 0.05


@pytest.mark.parametrize("bound", [F.relu6, F.hardtanh, F.hardsigmoid, lambda x: x.clamp(-0.3, 0.3)])
def test_bounds_are_unbiased_and_pass_what_is_no_number(bound):
    chosen = settings(bit_width=2)
    with region(chosen):
        y = F.layer_norm(images() * 1, (16,))
        known = known_values.find(bound(y), chosen)
    values, expected = known[1].decode(known[0]), bound(y.detach())
    is_bound = (expected == bound(torch.tensor(-1e9))) | (expected == bound(torch.tensor(1e9)))
    assert torch.equal(values[is_bound], expected[is_bound])  # inside, they are linear in an unbiased tensor
    x = images(False)
    x[0, 0, 0, 0] = torch.nan
    with region(chosen):
        out = bound(F.layer_norm(x.requires_grad_() * 1, (16,)))
        known = known_values.find(out, chosen)
    assert torch.equal(known[1].decode(known[0]).isnan(), out.isnan())


def test_bounds_the_wrong_way_round():
    with region(FOUR):
        y, _ = normalized()
        known = known_values.find(y.clamp(2.0, 1.0), FOUR)
    assert (known[1].decode(known[0]) == 1.0).all()


def test_products_of_two_functions_of_one_tensor_are_curved():
    chosen = settings(bit_width=2)
    weight = torch.linspace(0.5, 2, 16)
    with region(chosen):
        x = images() * 1
        assert known_values.find(F.layer_norm(x, (16,), weight) * F.layer_norm(x, (16,)), chosen) is None


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.SiLU(), nn.Dropout(0.2), first, nn.BatchNorm2d(8), nn.ReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(checkpoint(self.block, self.norm(x), use_reentrant=False))


@pytest.mark.parametrize("policy", [StochBackward4bit, StochBackward2bit])
@pytest.mark.parametrize("rules", [{"*"}, {"block", "norm"}, {"block"}])
def test_checkpoints_recompute_what_they_have_computed(policy, rules):
    model = brevact.quantize_backward(Checkpointed(), {rule: policy.let(min_numel=0) for rule in sorted(rules)})
    for _ in range(2):
        model(images() * 1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_entries_hold_neither_graphs_nor_tensors_larger_than_themselves():
    with region(FOUR):
        y, _ = normalized(norm="layer")
        gate = torch.rand(4, 8, 1, 1, requires_grad=True) * 1
        known = known_values.find(y * gate, FOUR)
        assert all(x.grad_fn is None for x in known[0])
        assert known_values.find(y[:, :, 0].clone(), FOUR) is None
        added = y
        for _ in range(16):
            added = added + torch.randn(4, 8, 16, 1)
        assert known_values.find(added, FOUR) is None


@pytest.mark.parametrize("bit_width", [2, 4, 8])
@pytest.mark.parametrize("act", [lambda x: F.silu(x, inplace=True), lambda x: F.elu_(x), torch.sigmoid_, torch.tanh_])
def test_in_place_functions_have_the_gradients_of_both_save_modes(act, bit_width):
    def gradients(mode: SaveMode) -> list[Tensor]:
        torch.manual_seed(0)
        weight, x = torch.randn(8, 8, 1, 1, requires_grad=True), images()
        with region(settings(bit_width=bit_width, save_mode=mode)):
            out = F.conv2d(act(F.conv2d(x * 1, weight)), weight).square().sum()
        return [each for _ in range(2) for each in torch.autograd.grad(out, [weight, x], retain_graph=True)]

    modes = SaveMode.SAVE_QUANTIZED, SaveMode.QUANTIZE_ON_BACKWARD
    assert all(torch.equal(now, later) for now, later in zip(*map(gradients, modes), strict=True))


@pytest.mark.parametrize(
    "function",
    [
        *(F.elu, F.celu, F.softplus),
        lambda x, number: F.hardtanh(x, -number, number),
    ],
)
def test_settings_in_tensors_are_numbers_of_the_forward_pass(function):
    number, batch, grad = torch.tensor(0.5), images().detach(), torch.randn(4, 8, 16, 16)

    def gradients() -> tuple[Tensor, ...]:
        x, weight = batch.clone().requires_grad_(), torch.ones(8, requires_grad=True)
        conv = torch.linspace(-1, 1, 64).view(8, 8, 1, 1).requires_grad_()
        out = F.conv2d(function(F.batch_norm(x, None, None, weight, training=True), number), conv)
        number.mul_(4)  # torch has read it
        return torch.autograd.grad(out, [weight, conv], grad)

    expected = gradients()
    number.fill_(0.5)
    with region(settings(bit_width=8)):
        found = gradients()
    for value, exact in zip(found, expected, strict=True):
        assert (value - exact).norm() / exact.norm() < 0.05


def test_another_device_begins_a_chain():
    with region(FOUR):
        y, _ = normalized()
        assert known_values.find(y.to("meta"), FOUR) is None
        assert known_values.find(y.double(), FOUR) is not None


@pytest.mark.parametrize("function", ["silu", "gelu", "softplus", "tanh", "glu", "elu of a tensor", "product"])
def test_derivations_of_many_steps_are_few_and_hold_no_tensors(function):
    """The table of derivations grows with the functions of a model, and not with its steps."""
    calls = {"elu of a tensor": lambda x: F.elu(x, torch.tensor(1.0)), "product": lambda x: x * torch.ones(16, 1, 1)}
    run = calls.get(function) or getattr(F, function)
    norm, conv = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)

    def step():
        with brevact.backward_quant():
            conv(run(norm(torch.randn(4, 16, 16, 16)))).sum().backward()

    derived._derivations.clear()
    step()
    step()
    entries = len(derived._derivations)
    for _ in range(3):
        step()
    gc.collect()
    assert len(derived._derivations) == entries
    seen, pending = set(), [derived._derivations]
    while pending:
        each = pending.pop()
        if id(each) in seen or isinstance(each, type | type(torch)):
            continue
        seen.add(id(each))
        assert not isinstance(each, torch.Tensor)
        if isinstance(each, dict | tuple | list | set) or type(each).__module__.startswith("brevact"):
            pending += gc.get_referents(each)
