"""Convolutions and batch norms that torch runs by itself: hooks pack their input, and nothing else is packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from brevact.autograd import BackwardSettings, SaveMode, region
from brevact.autograd.region.regions import Region
from tests.autograd.measuring import NEAREST, layer_gradients, settings, watch_saved

EPS = torch.finfo(torch.float32).eps
aten = torch.ops.aten


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
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).double()
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


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 5, 3), nn.BatchNorm2d(4)])
def test_features_made_in_inference_mode_train_what_follows(layer):
    """Torch saves no inference tensor; packed, it is none."""
    with torch.inference_mode():
        x = torch.randn(2, 4, 9, 9)
    with region(NEAREST):
        out = layer(x)
    grad_out = torch.randn(out.shape)
    found = torch.autograd.grad(out, list(layer.parameters()), grad_out)
    _, *expected = layer_gradients(layer, x.clone(), NEAREST, grad_out)
    for a, b in zip(found, expected, strict=True):
        atol = 64 * EPS * b.abs().max().item() if isinstance(layer, nn.BatchNorm2d) else 0  # as above
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("op", [nn.Conv2d(4, 5, 3), nn.BatchNorm2d(4), torch.cos])
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


@pytest.mark.parametrize("act", [nn.SiLU, nn.Identity])
def test_a_backward_pass_of_fake_tensors_behind_a_real_forward(act):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act(), nn.Conv2d(8, 8, 3))
    with region(settings(4)):
        out = model(torch.randn(8, 3, 16, 16)).sum()
    with FakeTensorMode(allow_non_fake_inputs=True):
        out.backward()
    assert all(isinstance(p.grad, FakeTensor) for p in model.parameters())
