"""Batches of gradients give the gradients of their rows, one backward pass each, from the same codes."""

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, SignedBinaryWeightPerTensorConst
from torch import nn
from torch.nn import functional as F

from brevact import StochBackward2bit
from brevact.autograd import region
from tests.autograd import ops
from tests.autograd.database_laws import settings_of
from tests.autograd.measuring import settings
from tests.autograd.op_database import OPS, name_of, samples, variants
from tests.autograd.op_database import run as run_sample
from tests.qat.cases import CHANNELS, activation, activation_layer

#: Powers of two, which scale each rounded product to the last bit.
FACTORS = torch.tensor([1.0, -2.0])


def one_by_one(loss, leaves, **options):
    grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return [None if grad is None else torch.stack([grad, -2 * grad]) for grad in grads]


def batched(loss, leaves, factors=FACTORS, **options):
    return torch.autograd.grad(loss, leaves, factors, is_grads_batched=True, retain_graph=True, allow_unused=True)


def mapped(loss, leaves, factors=FACTORS):
    return torch.func.vmap(lambda x: torch.autograd.grad(loss, leaves, x, retain_graph=True, allow_unused=True))(
        factors
    )


def check(grads, expected):
    assert [grad is None for grad in grads] == [grad is None for grad in expected]
    pairs = [(grad, reference) for grad, reference in zip(grads, expected, strict=True) if grad is not None]
    # Torch's own sums over a batch, in another order, relative to the largest gradient.
    top = max((x[x.isfinite()].abs().max().item() for _, x in pairs if x.isfinite().any()), default=0.0)
    for grad, reference in pairs:
        eps = 64 * torch.finfo(grad.dtype).eps
        torch.testing.assert_close(grad, reference, rtol=eps, atol=eps * top, equal_nan=True)


@pytest.mark.parametrize("op", ops.ALL, ids=lambda op: op.name)
def test_of_ops(op):
    function, leaf = op.make(), torch.randn(op.shape, requires_grad=True)
    leaves = [leaf, *(function.parameters() if isinstance(function, nn.Module) else ())]
    with region(settings()):
        loss = function(leaf.clone()).sin().sum()
    expected = one_by_one(loss, leaves)
    check(batched(loss, leaves), expected)
    check(mapped(loss, leaves), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_of_all_ops(op):
    def run(sample, packs):
        chosen = settings_of(StochBackward2bit, False) if packs else None
        rows, batch = (
            run_sample(variants(op)[0], sample, "activation", chosen, backward=b) for b in (one_by_one, batched)
        )
        check(batch.grads, rows.grads)

    for sample in samples(op, most=2):
        try:
            run(sample, packs=False)
        except Exception:  # torch's own op has no rule for batches, or (logcumsumexp) is not linear to the last bits
            continue
        run(sample, packs=True)


def quantized(act, weight):
    quantizer = {"weight_quant": weight, "input_quant": Int8ActPerTensorFloat}
    return lambda: nn.Sequential(activation_layer(act, relu=True), qnn.QuantConv2d(CHANNELS, 4, 3, **quantizer))


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(CHANNELS, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(0.3)),
        *(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.PReLU(8), nn.MaxPool2d(2)),
    )


class Classifier(nn.Sequential):
    def __init__(self):
        attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        super().__init__(nn.Flatten(2), nn.Linear(64, 16), attention, nn.Flatten(0, 1), nn.Linear(16, 20))

    def forward(self, x):
        return F.cross_entropy(super().forward(x), torch.arange(len(x) * CHANNELS) % 20, reduction="none")


MODELS = {
    "convolutions": convolutions,
    "classifier": Classifier,
    "quantized": quantized("uint4", Int8WeightPerTensorFloat),
    "quantized by groups": quantized("groups", SignedBinaryWeightPerTensorConst),
    "learned": quantized("parameter_per_channel", Int8WeightPerTensorFloat),
}


@pytest.mark.parametrize("recompute", [0, 10_000])
@pytest.mark.parametrize("name", MODELS)
def test_of_models(name, recompute):
    model, x = MODELS[name]().train(), activation(9).requires_grad_()
    leaves = [x, *model.parameters()]
    with region(settings(4, recompute=recompute)):
        out = model(x * 1)
        loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    expected = one_by_one(loss, leaves)
    check(batched(loss, leaves), expected)
    if recompute == 0:
        check(mapped(loss, leaves), expected)


def test_of_batches_of_batches():
    x = torch.randn(64, 100, requires_grad=True)
    with region(settings()):
        loss = x.relu().sin().sum()
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (found,) = torch.func.vmap(lambda factor: mapped(loss, [x], factor * FACTORS))(torch.tensor([1.0, 4.0, -8.0]))
    assert torch.equal(found, torch.outer(torch.tensor([1.0, 4.0, -8.0]), FACTORS)[..., None, None] * once)
