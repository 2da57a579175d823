"""Widths of samples: the best ones, their bytes, and which samples get them."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor

import brevact
from brevact.quantizers import SampleQuantizer, SampleWeights, widths_of_least_noise
from brevact.quantizers.formats.per_sample import NARROWEST, WIDEST


def noise(sensitivity: Tensor, widths: Tensor) -> float:
    return float((sensitivity.double() / (2.0 ** widths.double() - 1) ** 2).sum())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("total", [4, 7, 11, 20, 32])
def test_widths_of_least_noise_are_the_best_of_all(seed: int, total: int):
    sensitivity = torch.randn(4, generator=torch.Generator().manual_seed(seed)).mul(3).exp()
    widths = widths_of_least_noise(sensitivity, total)
    choices = itertools.product(range(NARROWEST, WIDEST + 1), repeat=4)
    best = min(noise(sensitivity, torch.tensor(choice)) for choice in choices if sum(choice) == total)
    assert widths.sum() == total
    assert noise(sensitivity, widths) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("sensitivity", [torch.zeros(6), torch.full((6,), 3.0), torch.full((6,), float("nan"))])
def test_widths_of_least_noise_are_even_where_nothing_tells_samples_apart(sensitivity: Tensor):
    for total in range(6, 49):
        widths = widths_of_least_noise(sensitivity, total)
        assert widths.sum() == total and widths.max() - widths.min() <= 1


@pytest.mark.parametrize("bit_width", [1, 1.7, 2, 4.5, 8])
@pytest.mark.parametrize("shape", [(32, 16, 8, 8), (8, 2048), (12, 3, 5, 7), (1, 4096)], ids=str)
def test_stored_bytes_follow_the_mean_width(bit_width: float, shape: tuple[int, ...]):
    """No more than the uniform codes and a scale a bucket, and some bytes to align eight widths."""
    quantizer = SampleQuantizer(bit_width=bit_width, bucket_size=128)
    x = torch.randn(shape)
    packed = quantizer.quantize(x, seed=0)
    elements = x.numel() // len(quantizer.bit_widths(packed))
    buckets = sum(pack.layout.numel // pack.quantizer.bucket_size for pack, _ in quantizer.packs(packed))
    slack = 8 * 5 + len(quantizer.bit_widths(packed)) + (36 if elements % 8 else 0)
    assert packed.nbytes == packed.buffer.untyped_storage().nbytes()
    assert packed.nbytes <= bit_width * x.numel() / 8 + 6 * buckets + slack
    assert quantizer.bit_widths(packed).sum() == int(bit_width * len(quantizer.bit_widths(packed)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_each_sample_has_the_noise_of_its_width(memory_format: torch.memory_format, dtype: torch.dtype):
    """E |error|^2 of stochastic rounding is step^2 / 6 an element of evenly spread values, to a few per cent."""
    torch.manual_seed(0)
    x = torch.rand(6, 32, 16, 16).to(dtype).to(memory_format=memory_format)
    quantizer = SampleQuantizer(bit_width=3, weights=SampleWeights())
    quantizer.weights.values = torch.tensor([1.0, 1e-6, 100.0, 1.0, 1e4, 1.0])
    packed = quantizer.quantize(x, seed=0)
    widths = quantizer.bit_widths(packed)
    assert widths.argsort(descending=True)[0] == 4 and widths[1] == 1
    error = (packed.dequantize().double() - x.double()).square().mean((1, 2, 3))
    rounding = torch.finfo(dtype).eps ** 2 / 12 / 7  # of the result's type: sum of 2^-3k over binades below 1
    expected = (2.0 ** widths.double() - 1) ** -2 / 6 + rounding
    assert ((error / expected - 1).abs() < 0.1).all()


def test_samples_of_wide_ranges_have_more_bits():
    x = torch.randn(8, 4096) * torch.tensor([1, 1, 1, 1, 1, 1, 1, 64.0])[:, None]
    widths = SampleQuantizer(bit_width=2).quantize(x, seed=0).tensors[1]
    assert widths[7] == widths.max() > 4 and widths[:7].max() <= 2


def test_samples_differ_by_weights_of_their_own_batch_alone():
    weights = SampleWeights()
    quantizer, x = SampleQuantizer(weights=weights), torch.rand(4, 1024)
    plain = quantizer.quantize(x, seed=0)
    weights.values = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert quantizer.quantize(x, seed=0).tensors[1].tolist() == [1, 1, 5, 1]
    rows = x.repeat(3, 1).view(3, 4, 1024).transpose(0, 1).reshape(12, 1024)  # three rows of each sample
    assert quantizer.quantize(rows, seed=0).tensors[1].view(4, 3).sum(1).argmax() == 2
    for other in (torch.ones(3), torch.ones(0), None):
        weights.values = other
        assert torch.equal(quantizer.quantize(x, seed=0).buffer, plain.buffer)
    assert quantizer.quantize(x.t(), seed=0).tensors[1].numel() > 1  # the slowest dimension is no batch


def test_weights_of_short_samples_add_up():
    weights = SampleWeights()
    weights.values = torch.tensor([0.0, 1.0, 0.0, 0.0])
    packed = SampleQuantizer(weights=weights).quantize(torch.rand(4, 256), seed=0)
    assert packed.tensors[1].tolist() == [3, 1]


def test_widths_have_noise_of_their_own():
    x = torch.rand(512).repeat(4, 1)
    weights = SampleWeights()
    weights.values = torch.tensor([0.0, 0.0, 1.0, 1.0])
    weighted = SampleQuantizer(bit_width=1.5, weights=weights)
    seeds = range(200)
    signs = torch.stack([(weighted.quantize(x, seed=s).dequantize() - x).sign() for s in seeds])
    narrow, wide = signs[:, 0].double(), signs[:, 2].double()
    correlation = (narrow * wide).mean() - narrow.mean(0).mul(wide.mean(0)).mean()
    assert abs(correlation) <= 5 / (200 * 512) ** 0.5


def test_sample_weights_are_shared_by_copies_and_have_no_values_in_a_file():
    quantizer = SampleQuantizer(weights=SampleWeights())
    quantizer.weights.values = torch.ones(2)
    assert copy.deepcopy(quantizer) == quantizer
    again = pickle.loads(pickle.dumps(quantizer))
    assert again != quantizer and again.weights.values is None


@pytest.mark.parametrize("kind", ["float", "compiled"])
def test_models_train_with_widths_of_samples(kind: str):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.SiLU(), torch.nn.Conv2d(16, 8, 3)
    )
    x = torch.randn(8, 3, 16, 16)
    model(x).square().mean().backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    brevact.quantize_backward(model, brevact.StochBackward4bitPerSample, min_numel=0)
    report = brevact.memory_report(model, x)
    assert report.saved_bytes < report.plain_bytes / 6
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True) if kind == "compiled" else model
    run(x).square().mean().backward()
    for p, grad in zip(model.parameters(), exact, strict=True):
        if grad.norm() > 1e-4:  # the bias in front of the norm has none
            assert (p.grad - grad).norm() <= 0.25 * grad.norm()
