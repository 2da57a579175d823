"""Stock Brevitas layers of every kind in a quantized model: their forward stays, their activations are packed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import brevitas.nn as qnn
import pytest
import torch
from brevitas.nn.quant_sdpa import QuantScaledDotProductAttention, ScaledDotProductAttention
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat
from brevitas.quant_tensor import QuantTensor
from torch import Tensor, nn

import brevact
from brevact.quantizers import UniformQuantizer
from tests.autograd.measuring import watch_saved


class Chain(nn.Module):
    def __init__(self, layer: nn.Module, call: Callable = lambda layer, x: layer(x), width: int = 8) -> None:
        super().__init__()
        self.first = qnn.QuantLinear(16, 2 * width, False, weight_quant=Int8WeightPerTensorFloat)
        self.act = qnn.QuantIdentity(return_quant_tensor=True)
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        out = self.call(self.layer, self.act(self.first(x)))
        out = out[0] if type(out) is tuple else out
        return out.value if isinstance(out, QuantTensor) else out


def heads(layer: nn.Module, x: Tensor, **options: object) -> Tensor:
    q, k, v = (x.value.roll(i, -1) for i in range(3))
    return layer(q, k, v, **options)


def itself(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x, x)[0]


MAPS, ROWS = (8, 4, 12, 16), (12, 64, 16)
ATTENTION = {"in_proj_bias_quant": None, "out_proj_bias_quant": None}
LAYERS = {
    "QuantMultiheadAttention": (lambda: Chain(qnn.QuantMultiheadAttention(16, 4, **ATTENTION), itself), ROWS),
    "QuantMultiheadAttention, split": (
        lambda: Chain(qnn.QuantMultiheadAttention(16, 2, packed_in_proj=False, dropout=0.1, **ATTENTION), itself),
        ROWS,
    ),
    "ScaledDotProductAttention": (lambda: Chain(ScaledDotProductAttention(), heads), MAPS),
    "ScaledDotProductAttention, causal dropout": (
        lambda: Chain(ScaledDotProductAttention(), lambda layer, x: heads(layer, x, dropout_p=0.1, is_causal=True)),
        MAPS,
    ),
    "QuantScaledDotProductAttention": (lambda: Chain(QuantScaledDotProductAttention(), heads), MAPS),
    "QuantRNN": (lambda: Chain(qnn.QuantRNN(16, 16), lambda layer, x: layer(x.value)), (4, 128, 16)),
    "QuantLSTM": (lambda: Chain(qnn.QuantLSTM(16, 16), lambda layer, x: layer(x.value)), (4, 128, 16)),
    "QuantEltwiseAdd": (lambda: Chain(qnn.QuantEltwiseAdd(), lambda layer, x: layer(x, x)), MAPS),
    # qnn.QuantCat calls QuantTensor.cat, which Brevitas 0.13.4 does not have.
    "torch.cat": (lambda: Chain(qnn.QuantReLU(), lambda layer, x: layer(torch.cat([x, x], 1))), MAPS),
    "TruncAvgPool2d": (lambda: Chain(qnn.TruncAvgPool2d(2)), MAPS),
    "TruncAdaptiveAvgPool2d": (lambda: Chain(qnn.TruncAdaptiveAvgPool2d(2)), MAPS),
    "MaxPool2d": (lambda: Chain(nn.MaxPool2d(2)), MAPS),
    "QuantUpsample": (lambda: Chain(qnn.QuantUpsample(scale_factor=2, mode="nearest")), MAPS),
    "QuantUpsamplingNearest2d": (lambda: Chain(qnn.QuantUpsamplingNearest2d(scale_factor=2)), MAPS),
    "QuantUpsamplingBilinear2d": (lambda: Chain(qnn.QuantUpsamplingBilinear2d(scale_factor=2)), MAPS),
    "QuantConv1d": (lambda: Chain(qnn.QuantConv1d(64, 8, 3), lambda layer, x: layer(x)), ROWS),
    "QuantConvTranspose1d": (lambda: Chain(qnn.QuantConvTranspose1d(64, 8, 3)), ROWS),
    "QuantConvTranspose2d": (lambda: Chain(qnn.QuantConvTranspose2d(4, 6, 3, stride=2)), MAPS),
    "QuantConvTranspose3d": (
        lambda: Chain(qnn.QuantConvTranspose3d(1, 2, 3), lambda layer, x: layer(x.value.unsqueeze(1))),
        MAPS,
    ),
    "QuantScaleBias": (lambda: Chain(qnn.QuantScaleBias(4, True)), MAPS),
    "BatchNorm2dToQuantScaleBias": (lambda: Chain(qnn.BatchNorm2dToQuantScaleBias(4)), MAPS),
    "QuantReLU": (lambda: Chain(qnn.QuantReLU()), MAPS),
    "QuantSigmoid": (lambda: Chain(qnn.QuantSigmoid()), MAPS),
    "QuantTanh": (lambda: Chain(qnn.QuantTanh()), MAPS),
    "QuantHardTanh": (lambda: Chain(qnn.QuantHardTanh(Int8ActPerTensorFloat, max_val=1.0, min_val=-1.0)), MAPS),
    "QuantIdentity": (lambda: Chain(qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat)), MAPS),
}
every_layer = pytest.mark.parametrize("make, shape", LAYERS.values(), ids=LAYERS.keys())


def train(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Output, gradients of parameters, and saved tensors other than parameters and buffers."""
    torch.manual_seed(1)
    with watch_saved() as saved:
        out = model.train()(x)
    (out * torch.linspace(-3, 3, out.numel()).sin().view(out.shape)).sum().backward()
    state = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept = {t.untyped_storage().data_ptr(): t for t in saved.tensors}
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return out.detach(), grads, [t for pointer, t in kept.items() if pointer not in state]


def nbytes(tensors: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@every_layer
def test_brevitas_layers_keep_their_forward_and_store_less(make, shape):
    torch.manual_seed(0)
    plain, x = make(), torch.randn(shape)
    models = {bits: copy.deepcopy(plain) for bits in (2, 8, 32)}
    expected, expected_grads, plain_kept = train(plain, x)
    kept = {}
    for bits, model in models.items():
        quantizer = UniformQuantizer(bit_width=bits, bucket_size=64)
        brevact.quantize_backward(model, quantizer, min_numel=256, residual_bit_width=bits)
        out, grads, kept[bits] = train(model, x)
        assert torch.equal(out, expected)
        assert model.state_dict().keys() == plain.state_dict().keys()
        for key, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key
        # noise of one part in 2 sqrt(255) of a range of some six deviations; formulas alone at 32 bits
        allowed = {2: float("inf"), 8: 0.1, 32: 1e-4}[bits]
        size = torch.cat([grad.flatten() for grad in expected_grads]).norm()
        assert len(grads) == len(expected_grads)
        for grad, reference in zip(grads, expected_grads, strict=True):
            assert (grad - reference).norm() <= allowed * max(reference.norm(), 0.1 * size)
    assert nbytes(kept[2]) < nbytes(kept[8]) or not any(t.dtype is torch.uint8 for t in kept[2])
    assert nbytes(kept[8]) < nbytes(plain_kept)


@every_layer
def test_weights_of_brevitas_layers_are_not_packed(make, shape):
    # Sizes tell: no activation here has as many elements as a weight.
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    quantizer = UniformQuantizer(bit_width=5)
    sizes = {quantizer.quantize(p.detach()).nbytes for p in model.parameters() if p.numel() > 16}
    brevact.quantize_backward(model, quantizer, min_numel=0)
    _, _, kept = train(model, x)
    packed = {t.untyped_storage().nbytes() for t in kept if t.dtype is torch.uint8}
    assert packed and not sizes & packed
