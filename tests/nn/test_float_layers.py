import pytest
import torch
from torch import nn

import brevact.nn as bnn
from brevact.injectors import StochBackward2bit

ARGUMENTS = {
    "BatchNorm1d": (8,),
    "BatchNorm2d": (8,),
    "BatchNorm3d": (8,),
    "InstanceNorm1d": (8,),
    "InstanceNorm2d": (8,),
    "InstanceNorm3d": (8,),
    "LayerNorm": (16,),
    "GroupNorm": (2, 8),
    "RMSNorm": (16,),
    "Softmax": (1,),
    "MaxPool1d": (2,),
    "MaxPool2d": (3, 2, 1),
    "MaxPool3d": (2,),
    "AvgPool1d": (2,),
    "AvgPool2d": (2,),
    "AvgPool3d": (2,),
    "AdaptiveAvgPool1d": (4,),
    "AdaptiveAvgPool2d": ((4, 3),),
    "AdaptiveAvgPool3d": (4,),
    "AdaptiveMaxPool1d": (4,),
    "AdaptiveMaxPool2d": ((4, 3),),
    "AdaptiveMaxPool3d": (4,),
    "Dropout": (0.25,),
}
NAMES = [name for name in bnn.__all__ if "Quant" not in name]
#: Layers whose gradient reads no rounded value: masks and indices are kept without loss, means need nothing.
EXACT = {name for name in NAMES if "Pool" in name} | {"ReLU", "ReLU6", "LeakyReLU", "Hardsigmoid", "Dropout"}
BITS = {}, {"act_bit_width": 32}


def build(module, name, **kwargs):
    return getattr(module, name)(*ARGUMENTS.get(name, ()), **kwargs)


def activation(name, dtype=torch.float32):
    torch.manual_seed(0)
    dims = int(name[-2]) if name[-2].isdigit() else 2
    return torch.randn(4, 8, *{1: (256,), 2: (16, 16), 3: (8, 8, 16)}[dims], dtype=dtype).requires_grad_()


def step(layer, x, seed=1):
    torch.manual_seed(seed)
    y = layer(x * 1.0)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return y, torch.autograd.grad(loss, [x, *layer.parameters()])


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_torchs_but_for_what_it_stores(name, saved_bytes):
    """Forward and state; a fourth of the bytes at most; gradients, where nothing is rounded, and exact masks."""
    plain, packed, exact = build(nn, name), *(build(bnn, name, act_quant=StochBackward2bit, **bits) for bits in BITS)
    assert isinstance(packed, getattr(nn, name))
    assert packed.state_dict().keys() == plain.state_dict().keys()
    for layer in (packed, exact):
        layer.load_state_dict(plain.state_dict())
    plain.load_state_dict(packed.state_dict())
    x = activation(name)
    for turn in range(2):
        (out, expected), (found, grads) = step(plain, x), step(packed, x)
        assert torch.equal(found, out)
        assert name not in EXACT or torch.equal(grads[0], expected[0])
        if turn == 0:
            for a, b in zip(step(exact, x)[1], expected, strict=True):  # up to float32 rounding in another order
                assert torch.linalg.vector_norm(a - b) <= 100 * torch.finfo(a.dtype).eps * torch.linalg.vector_norm(b)
    plain_bytes, packed_bytes = (saved_bytes(lambda layer=layer: layer(x * 1.0))[1] for layer in (plain, packed))
    # x * 1.0 itself stores nothing of x's size; a pool or mean may store the input for its shape alone.
    assert packed_bytes <= plain_bytes / 4
    assert torch.equal(packed.eval()(x), plain.eval()(x))
    assert all(torch.equal(a, b) for a, b in zip(packed.buffers(), plain.buffers(), strict=True))


@pytest.mark.parametrize("name", ["BatchNorm2d", "SiLU", "ReLU", "MaxPool2d"])
def test_layer_in_float64_works(name, saved_bytes):
    layer = build(bnn, name, act_quant=StochBackward2bit).to(torch.float64)
    plain = build(nn, name).to(torch.float64)
    x = activation(name, torch.float64)
    (expected, _), (result, grads) = step(plain, x), step(layer, x)
    assert torch.equal(result, expected)
    assert all(grad.dtype is torch.float64 for grad in grads)
