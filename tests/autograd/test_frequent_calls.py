"""Frequent calls of convolutional nets, in the spellings and with the arguments that their handlers tell apart."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import brevact
from brevact.autograd.saving import storage_report


def _nested(x):
    return torch.nested.as_nested_tensor(list(x.flatten(2)))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.silu(input=x),
        lambda x: F.silu(x, inplace=True),
        lambda x: F.hardswish(F.avg_pool2d(F.batch_norm(x, None, None, training=True), 2)),  # known, and small
        lambda x: torch.add(x, x, alpha=2),
        lambda x: torch.add(x, 1.0),
        lambda x: x + x[:, :1],
        lambda x: (x.to_sparse() + x.to_sparse()).to_dense(),
        lambda x: (x.to_mkldnn() + x.to_mkldnn()).to_dense(),
        lambda x: (_nested(x) + _nested(x)).to_padded_tensor(0.0),
        lambda x: torch.conv2d(x, x[:2, :, :3, :3]),
        lambda x: F.adaptive_avg_pool2d(x, torch.tensor([1, 1])),
        lambda x: F.adaptive_avg_pool2d(x, (1, 2)),
        lambda x: F.adaptive_avg_pool2d(F.max_pool2d(x, 10), 1),  # an average of few derives
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
        lambda x: F.batch_norm(x, None, None, torch.ones(4), torch.zeros(4), True, 0.1, 1e-5),
    ],
)
def test_a_report_changes_no_gradient_of_a_call(call):
    conv, x, found = nn.Conv2d(4, 4, 1), torch.randn(4, 4, 20, 20), []
    for around in (nullcontext, storage_report.recording):
        torch.manual_seed(1)
        with around(), brevact.backward_quant(brevact.StochBackward4bit):
            y = conv(x)
            out = call(y)
        found.append((out, *torch.autograd.grad(out.square().sum(), list(conv.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("take", [lambda w: w[:], lambda w: w.view_as(w), lambda w: w[:4], lambda w: w * 1.0])
def test_weights_that_are_views_of_parameters_are_kept_as_they_are(take):
    """Brevitas' layers read theirs by an index."""
    first, layer, x = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 3), torch.randn(4, 3, 12, 12)
    with brevact.backward_quant(brevact.StochBackward4bit):
        out = torch.conv2d(first(x), take(layer.weight), None, (1, 1), (0, 0), (1, 1), 1)
    found = torch.autograd.grad(out.square().sum(), list(first.parameters()))
    plain = torch.conv2d(first(x), take(layer.weight), None, (1, 1), (0, 0), (1, 1), 1)
    # The bias' gradient reads the weight alone.
    assert torch.equal(found[1], torch.autograd.grad(plain.square().sum(), list(first.parameters()))[1])


@pytest.mark.parametrize("take", [lambda w: w, lambda w: w[:]])
def test_weights_that_change_before_the_backward_pass_are_refused(take):
    first, layer = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 3)
    with brevact.backward_quant(brevact.StochBackward4bit):
        out = torch.conv2d(first(torch.randn(4, 3, 12, 12)), take(layer.weight), None, (1, 1), (0, 0), (1, 1), 1)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
