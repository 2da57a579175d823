"""Models on the meta device and under fake tensors: outputs and gradients have the shapes of those without a policy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import brevact
from benchmarks.small_models import CONVOLUTIONAL, TRANSFORMERS
from benchmarks.step import loss_of, quantized
from brevact import (
    DualPrecisionBackward2bit,
    L4Backward,
    LosslessBackward,
    NearestBackward4bit,
    StochBackward2bit,
    StochBackward2bit4bitMix,
    WeibullBackward3bit,
)
from tests.autograd.measuring import watch_saved
from tests.crosses import some_of

POLICIES = (
    *(StochBackward2bit, NearestBackward4bit, StochBackward2bit4bitMix, WeibullBackward3bit),
    *(L4Backward, DualPrecisionBackward2bit, LosslessBackward),
)


def net() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(16, 16, 3),
        ),
        *(nn.GroupNorm(4, 16), nn.SiLU(inplace=True), nn.Dropout(0.5), nn.InstanceNorm2d(16), nn.Flatten(2)),
        *(nn.Linear(100, 32), nn.LayerNorm(32), nn.GELU(), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)),
        *(
            nn.Softmax(-1),
            nn.PReLU(),
            nn.Unflatten(1, (8, 2)),
            nn.Softmax(2),
            nn.Flatten(1, 2),
            nn.utils.parametrizations.weight_norm(nn.Linear(32, 4)),
        ),
    )


def shapes(model: nn.Module, x: Tensor) -> list[torch.Size]:
    x.requires_grad_()
    out = model(x)
    (out * 2.0).sum().backward()
    assert x.grad is not None
    return [out.shape, x.grad.shape, *(p.grad.shape for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("policy", "fake"), [*((policy, False) for policy in POLICIES), (StochBackward2bit, True), (LosslessBackward, True)]
)
def test_shapes_are_those_of_the_model(policy, fake):
    plain = net()
    model = brevact.quantize_backward(copy.deepcopy(plain), policy, min_numel=0)
    expected = shapes(plain, torch.randn(4, 3, 16, 16))
    if fake:
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = shapes(model, torch.randn(4, 3, 16, 16))
    else:
        found = shapes(model.to("meta"), torch.randn(4, 3, 16, 16, device="meta"))
    assert found == expected and len(expected) > 20


@pytest.mark.parametrize("policy", [StochBackward2bit, brevact.DEFAULT, LosslessBackward])
def test_autocast_of_another_device_leaves_the_meta_device_alone(policy):
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.PReLU(), nn.GroupNorm(4, 16), nn.Flatten(), nn.Linear(64, 4))
    for model in (nn.Sequential(*layers), brevact.quantize_backward(nn.Sequential(*layers), policy)):
        x = torch.randn(512, 3, 4, 4, device="meta", requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = model.to("meta")(x)
        (out * 2.0).sum().backward()
        assert out.dtype is torch.float32 and x.grad.shape == x.shape


@pytest.mark.parametrize("name", some_of(["ConvNeXt", "BERT", "ResNet-20"], quick=3))
def test_real_models_on_the_meta_device(name):
    plain = (TRANSFORMERS | CONVOLUTIONAL)[name].build()
    model = quantized(plain, StochBackward2bit)
    for subject in (plain, model):
        subject.model.to("meta")
        batch = tree_map_only(Tensor, lambda x: x.to("meta"), subject.batch)
        loss_of(subject._replace(batch=batch)).backward()
    for p, q in zip(plain.model.parameters(), model.model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or p.grad.shape == q.grad.shape)


def test_codes_on_the_meta_device_have_their_sizes():
    layer = nn.Linear(64, 64)
    sizes = []
    for device in ("cpu", "meta"):
        model = brevact.quantize_backward(copy.deepcopy(layer).to(device), StochBackward2bit)
        with watch_saved() as saved:
            model(torch.randn(128, 64, device=device).requires_grad_() * 1)
        sizes.append(sorted(x.nbytes for x in saved.tensors))
    assert sizes[0] == sizes[1]
    packed = brevact.quantizer(StochBackward2bit).quantize(torch.randn(4096, device="meta"))
    assert packed.nbytes == 4096 // 4 + 8 * 6 and packed.dequantize().shape == (4096,)
