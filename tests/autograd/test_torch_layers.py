"""Convolutions and batch norms that torch runs by itself: hooks keep their input, and nothing else is packed."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import brevact
from brevact.autograd import BackwardSettings, SaveMode, region, storage_report
from brevact.autograd.regions import Region
from brevact.quantizers import PackedSpec, Rounding, denormalize, normalize
from tests.autograd.measuring import settings, watch_saved

NEAREST = settings(rounding=Rounding.NEAREST)
EPS = torch.finfo(torch.float32).eps
aten = torch.ops.aten


def gradients(layer: nn.Module, x: Tensor, chosen, grad_out: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().clone().requires_grad_()
    with region(chosen):
        out = layer(leaf * 1)
    return torch.autograd.grad(out, [leaf, *layer.parameters()], grad_out)


@pytest.mark.usefixtures("sums_of_aten")
def test_statistics_of_many_channels_are_not_packed():
    """Of 5000 channels each statistic is large enough, by the settings that users have."""
    x, grad_out = torch.randn(4, 5000, 8), torch.randn(4, 5000, 8)
    norm = nn.BatchNorm1d(5000)
    nn.init.normal_(norm.weight)
    chosen = settings(rounding=Rounding.NEAREST, min_numel=4096)
    found = gradients(norm, x, chosen, grad_out)
    _, mean, invstd = torch.native_batch_norm(x, norm.weight, norm.bias, None, None, True, 0.1, norm.eps)
    statistics = mean[:, None], invstd[:, None]
    packed = NEAREST.quantizer.quantize(normalize(x, *statistics))
    decoded = denormalize(packed, None, invstd[:, None], torch.float32)  # less its means, which are 0 then
    expected = aten.native_batch_norm_backward(
        grad_out, decoded, norm.weight, None, None, torch.zeros_like(mean), invstd, True, norm.eps, [True] * 3
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("computed", [False, True])
def test_weights_of_the_sizes_of_the_input_are_not_packed(computed):
    layer, x, grad_out = nn.Conv2d(4, 4, 3, bias=False), torch.randn(4, 4, 3, 3), torch.randn(4, 4, 1, 1)
    if computed:  # as a fake-quantized weight is
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    grad_input, _ = gradients(layer, x, NEAREST, grad_out)
    geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    expected = aten.convolution_backward(grad_out, x, layer.weight, None, *geometry, [True, False, False])
    assert torch.equal(grad_input, expected[0])


LAYERS = {
    "conv": (nn.Conv2d(6, 5, 3, padding="same"), (2, 6, 9, 9)),
    "even kernel": (nn.Conv2d(6, 4, 4, groups=2, padding="same"), (2, 6, 9, 9)),
    "unbatched": (nn.Conv1d(6, 5, 3, bias=False), (6, 20)),
    "transposed": (nn.ConvTranspose2d(6, 5, 3, stride=2, output_padding=1), (2, 6, 9, 9)),
    "batch norm": (nn.BatchNorm2d(6), (3, 6, 8, 8)),
    "batch norm without weights": (nn.BatchNorm3d(6, affine=False, track_running_stats=False), (3, 6, 4, 4, 4)),
    "batch norm of vectors": (nn.BatchNorm1d(6), (30, 6)),
}


FORMATS = [
    *((name, torch.contiguous_format) for name in LAYERS),
    *((name, torch.channels_last) for name, (_, shape) in LAYERS.items() if len(shape) == 4),
]


@pytest.mark.parametrize(("name", "memory_format"), FORMATS)
@pytest.mark.parametrize("mode", list(SaveMode))
def test_what_is_packed_and_the_gradients_are_those_of_a_function(name, memory_format, mode, monkeypatch):
    (layer, shape), found = LAYERS[name], []
    x = torch.randn(shape, requires_grad=True)
    for runs_torch in (True, False):
        monkeypatch.setattr(Region, "torch_runner", lambda region, *_, runs=runs_torch: region.hooks if runs else None)
        torch.manual_seed(0)
        with watch_saved() as saved, region(settings(save_mode=mode)):
            out = layer((x * 1).contiguous(memory_format=memory_format))
        assert out.grad_fn is not None
        grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
        codes = [tensor for tensor in saved.tensors if tensor.dtype is torch.uint8]
        assert len(codes) == (mode is SaveMode.SAVE_QUANTIZED)
        found.append((*grads, *codes))
    for a, b in zip(*found, strict=True):
        # Torch's batch norm reads x^ sigma + mean, the Function x^ sigma: roundings of sums of hundreds.
        atol = 64 * EPS * b.abs().max().item() if "norm" in name and b.is_floating_point() else 0
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_a_second_derivative_is_torchs_where_nothing_is_packed():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.double, requires_grad=True)

    def penalty(chosen) -> tuple[Tensor, ...]:
        with region(chosen):
            out = model(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *(p for p in model.parameters() if p.dim() > 1)])

    found, expected = penalty(settings(min_numel=10**6)), penalty(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(RuntimeError, match="double backward"):
        penalty(settings())


def test_an_interrupted_layer_leaves_the_region_as_it_was():
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=True)
    stored: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if not stored:
            stored.append(tensor)
            raise KeyboardInterrupt
        stored.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), region(settings()):
        with pytest.raises(KeyboardInterrupt):
            layer(x)
        F.conv2d(x, layer.weight.detach()).exp()  # a Function, and an op that is left to the hooks
    assert all(tensor.dtype is torch.uint8 or tensor.shape == layer.weight.shape for tensor in stored)


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 5, 3), nn.BatchNorm2d(4)])
def test_features_made_in_inference_mode_train_what_follows(layer):
    """Torch saves no inference tensor; packed, it is none."""
    with torch.inference_mode():
        x = torch.randn(2, 4, 9, 9)
    with region(NEAREST):
        out = layer(x)
    grad_out = torch.randn(out.shape)
    found = torch.autograd.grad(out, list(layer.parameters()), grad_out)
    _, *expected = gradients(layer, x.clone(), NEAREST, grad_out)
    for a, b in zip(found, expected, strict=True):
        atol = 64 * EPS * b.abs().max().item() if isinstance(layer, nn.BatchNorm2d) else 0  # as above
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("op", [nn.Conv2d(4, 5, 3), nn.BatchNorm2d(4), torch.cosh])
def test_quantizers_may_use_autograd(op):
    class Fitting:
        is_stochastic = False

        def quantize(self, x: Tensor, seed: object = None):
            with torch.enable_grad():
                scale = torch.ones((), requires_grad=True)
                (x.detach() * scale).exp().sum().backward()
            return NEAREST.quantizer.quantize(x)

    x = torch.randn(2, 4, 9, 9, requires_grad=True)
    with watch_saved() as saved, region(BackwardSettings(Fitting(), min_numel=0)):
        op(x * 1).sum().backward()
    assert sum(tensor.dtype is torch.uint8 for tensor in saved.tensors) == 1


def test_weights_that_are_activations_are_not_packed():
    """As in the correlation of two feature maps."""
    x, y = (torch.randn(4, 4, 3, 3, requires_grad=True) for _ in range(2))
    grad_out = torch.randn(4, 4, 3, 3)
    with region(settings()):
        out = F.conv2d(x * 1, y * 1, padding=1)
    (found,) = torch.autograd.grad(out, x, grad_out)
    assert torch.equal(found, torch.autograd.grad(F.conv2d(x, y, padding=1), x, grad_out)[0])


def test_an_input_that_is_its_own_weight_is_kept_for_both():
    x, grad_out = torch.randn(4, 4, 3, 3, requires_grad=True), torch.randn(4, 4, 3, 3)
    with region(NEAREST):
        y = x * 1
        out = F.conv2d(y, y, padding=1)
    geometry = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    by_input = aten.convolution_backward(grad_out, x, x, None, *geometry, [True, False, False])[0]
    decoded = NEAREST.quantizer.quantize(x).dequantize()
    by_weight = aten.convolution_backward(grad_out, decoded, x, None, *geometry, [False, True, False])[1]
    assert torch.equal(torch.autograd.grad(out, x, grad_out)[0], by_input + by_weight)


class Branches(nn.Module):
    """Two batch norms of one tensor, each followed by a layer that reads what derives from it."""

    def __init__(self, affine: bool = True, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, affine=affine, momentum=momentum) for _ in range(2))
        for norm in self.norms:
            if affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        a, b = (F.silu(norm(x)) for norm in self.norms)
        return self.second(a + b)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("rounding", list(Rounding))
def test_planned_batch_norms_have_the_gradients_of_others(options, memory_format, rounding):
    model, found = Branches(**options).to(memory_format=memory_format), []
    x = torch.randn(3, 3, 9, 9).contiguous(memory_format=memory_format)
    start = copy.deepcopy(model.state_dict())
    for around in (nullcontext, storage_report.recording):  # a report asks how the input is kept
        model.load_state_dict(start)
        torch.manual_seed(0)
        with around(), region(settings(4, rounding)):
            out = model(x)
        with torch.no_grad():
            for norm in model.norms:
                if norm.affine:
                    norm.bias.add_(1.0)  # as plain PyTorch allows
        first = torch.autograd.grad(out.square().sum(), list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        found.append((out, *first, *model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_batch_norms_of_a_tensor_share_what_a_plan_has_packed(monkeypatch):
    model, made = Branches(), []
    empty = PackedSpec.empty
    monkeypatch.setattr(PackedSpec, "empty", lambda *args: made.append(args[0].layout.shape) or empty(*args))
    with region(settings(4)):
        out = model(torch.randn(3, 3, 9, 9))
    assert made.count((3, 8, 9, 9)) == 1
    out.sum().backward()


def test_batch_norms_refuse_statistics_of_another_device():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    model[1].running_mean, model[1].running_var = torch.zeros(8, device="meta"), torch.ones(8, device="meta")
    with region(settings()), pytest.raises(RuntimeError, match="device meta"):
        model(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("act", [nn.SiLU, nn.Identity])
def test_a_backward_pass_of_fake_tensors_behind_a_real_forward(act):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act(), nn.Conv2d(8, 8, 3))
    with region(settings(4)):
        out = model(torch.randn(8, 3, 16, 16)).sum()
    with FakeTensorMode(allow_non_fake_inputs=True):
        out.backward()
    assert all(isinstance(p.grad, FakeTensor) for p in model.parameters())


def test_a_small_view_of_a_parameter_as_input_is_kept_as_it_is():
    model = Rows()
    report = brevact.memory_report(model, torch.randn(2, 2))
    assert report.saved_bytes == 0


class Rows(nn.Module):
    """A convolution of rows of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Parameter(torch.randn(100, 3, 8, 8)), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.rows[3:5]).sum() + x.sum()


def test_planned_batch_norms_refuse_changed_weights_and_second_derivatives():
    norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 8, 8, requires_grad=True)
    with region(settings()):
        out = norm(x * 1)
    assert "Planned" in type(out.grad_fn).__name__
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    with torch.no_grad():
        norm.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_planned_batch_norms_mark_what_is_not_finite():
    found = []
    for around in (nullcontext, storage_report.recording):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 8, 8)
        x[0, 1, 2, 3], x[1, 2] = float("inf"), 5.0
        x.requires_grad_()
        with around(), region(settings()):
            out = F.relu(norm(x * 1))
        found.append(torch.autograd.grad(out, [x, *norm.parameters()], torch.randn(out.shape)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
