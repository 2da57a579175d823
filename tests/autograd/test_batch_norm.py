"""Batch norms, planned or not, of one process or synchronized."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact.autograd import BackwardSettings, region
from brevact.autograd.saving import storage_report
from brevact.quantizers import Rounding, UniformQuantizer, denormalize, normalize
from tests.autograd import ops
from tests.autograd.measuring import NEAREST, layer_gradients, run_op, settings, watch_saved
from tests.autograd.sync_batch_norm import SavesStatistics

aten = torch.ops.aten


def test_batch_norm_takes_the_eps_that_torch_takes():
    x, found = torch.randn(2, 4, 32, 32, requires_grad=True), []
    for policy in (None, brevact.StochBackward4bit):
        with brevact.backward_quant(policy):
            try:
                found.append(F.batch_norm(x * 1, None, None, None, None, True, 0.1, 0.0).tolist())
            except ValueError as error:  # of recent versions
                found.append(str(error))
    assert found[0] == found[1]


def test_batch_norm_bias_is_that_of_one_copy():
    # ActNN, appendix B.2: one copy biases the input gradient by -Var[x^] g / N only.
    draws, x, norm = 300, torch.randn(16, 4, 12, 12), nn.BatchNorm2d(4)
    op = ops.Op("batch_norm", lambda: norm)
    _, (expected, expected_weight, expected_bias) = run_op(op, norm, x, None)
    samples = [run_op(op, norm, x, settings(bit_width=2), seed)[1] for seed in range(draws)]
    weight = torch.stack([grads[1] for grads in samples]).double()
    assert ((weight.mean(0) - expected_weight).abs() <= 5 * weight.std(0) / draws**0.5).all()
    torch.testing.assert_close(samples[0][2], expected_bias)
    values = torch.stack([grads[0] for grads in samples]).double()
    step = (x.max() - x.min()) / 3  # Var[x^] <= step^2 / 4; N elements a channel; |g| <= 1, invstd about 1
    bias = (step**2 / 4) / (x.numel() / 4) * 2
    assert ((values.mean(0) - expected).abs() <= 5 * values.std(0) / draws**0.5 + bias).all()


def test_synchronized_batch_norm_of_one_process_is_batch_norm():
    results = []
    x = torch.randn(8, 4, 6, 6)
    for make in (nn.BatchNorm2d, nn.SyncBatchNorm):
        for training in (True, False):
            norm = make(4).train(training)
            leaf = x.clone().requires_grad_()
            torch.manual_seed(0)
            with watch_saved() as saved, region(settings(bit_width=4)):
                out = norm(leaf * 1)
            grads = torch.autograd.grad((out * x.sin()).sum(), [leaf, *norm.parameters()])
            results.append((out, *grads, norm.running_mean, torch.tensor(saved.nbytes)))
    for batch, synchronized in zip(results[:2], results[2:], strict=True):
        for a, b in zip(batch, synchronized, strict=True):
            assert torch.equal(a, b)


def test_functions_that_save_statistics_keep_them_and_pack_their_input():
    # With the default of 4096 elements, beyond the channels of any model, statistics are stored as they are.
    quantizer = UniformQuantizer(bit_width=4, rounding=Rounding.NEAREST, bucket_size=64)
    x, weight = torch.randn(8, 16, 8, 8, requires_grad=True), torch.ones(16, requires_grad=True)
    with watch_saved() as saved, region(BackwardSettings(quantizer)):
        out = SavesStatistics.apply(x * 1, weight)
    codes = [t for t in saved.tensors if t.dtype is torch.uint8]
    assert len(codes) == 1 and codes[0].numel() == quantizer.quantize(x).nbytes
    var, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0)
    assert any(torch.equal(t, mean) for t in saved.tensors)
    g = torch.linspace(-1, 1, x.numel()).view(x.shape)
    decoded = quantizer.quantize(x.detach()).dequantize()
    expected = torch.ops.aten.native_batch_norm_backward(
        g, decoded, weight, None, None, mean, torch.rsqrt(var + 1e-5), True, 1e-5, [True, True, False]
    )
    torch.testing.assert_close(torch.autograd.grad(out, (x, weight), g), expected[:2])


@pytest.mark.usefixtures("sums_of_aten")
def test_statistics_of_many_channels_are_not_packed():
    """At 5000 channels each statistic is large enough to pack by the default settings."""
    x, grad_out = torch.randn(4, 5000, 8), torch.randn(4, 5000, 8)
    norm = nn.BatchNorm1d(5000)
    nn.init.normal_(norm.weight)
    chosen = settings(rounding=Rounding.NEAREST, min_numel=4096)
    found = layer_gradients(norm, x, chosen, grad_out)
    _, mean, invstd = torch.native_batch_norm(x, norm.weight, norm.bias, None, None, True, 0.1, norm.eps)
    statistics = mean[:, None], invstd[:, None]
    packed = NEAREST.quantizer.quantize(normalize(x, *statistics))
    decoded = denormalize(packed, None, invstd[:, None], torch.float32)  # less its means, which are 0 then
    expected = aten.native_batch_norm_backward(
        grad_out, decoded, norm.weight, None, None, torch.zeros_like(mean), invstd, True, norm.eps, [True] * 3
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Branches(nn.Module):
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


def test_batch_norms_refuse_statistics_of_another_device():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    model[1].running_mean, model[1].running_var = torch.zeros(8, device="meta"), torch.ones(8, device="meta")
    with region(settings()), pytest.raises(RuntimeError, match="device meta"):
        model(torch.randn(2, 3, 8, 8))


def test_planned_batch_norms_refuse_changed_weights_and_second_derivatives():
    norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 8, 8, requires_grad=True)
    with region(settings()):
        out = norm(x * 1)
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
