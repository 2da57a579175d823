"""Tensors whose elements come from forward quantizers: the layers that read them keep their codes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import brevact
from brevact import StochBackward2bit
from tests.qat.cases import CHANNELS, activation, activation_layer, gradients

MOVES = {
    "cat": lambda a, b: torch.cat([a, b], 1),
    "cat_keyword": lambda a, b: torch.cat(tensors=(a, b, a), dim=-1),
    "stack": lambda a, b: torch.stack([a, b]).flatten(0, 1),
    "pad": lambda a, b: F.pad(a, (1, 2, 0, 1)),
    "pad_value": lambda a, b: F.pad(a, (1, 2), value=0.3),
    "reflect": lambda a, b: F.pad(b, (1, 1, 1, 1), mode="reflect"),
    "contiguous": lambda a, b: a.transpose(1, 3).contiguous(),
    "channels_last": lambda a, b: a.contiguous(memory_format=torch.channels_last),
    "reshape": lambda a, b: a.permute(0, 2, 3, 1).reshape(4, -1, 2, 4),
    "clone": lambda a, b: b.clone(),
    "repeat": lambda a, b: a.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda a, b: a.repeat_interleave(2, 1),
    "rot90": lambda a, b: b.rot90(1, (2, 3)),
    "flip": lambda a, b: torch.flip(a, (2,)),
    "shuffle": lambda a, b: F.pixel_shuffle(a, 2),
    "twice": lambda a, b: F.pad(torch.cat([a, b], 1), (1, 1)),
    "max_pool": lambda a, b: F.max_pool2d(a, 3, 2, 1),
    "max_pool_of_channels_last": lambda a, b: F.max_pool2d(a.contiguous(memory_format=torch.channels_last), 2),
    "max_pool1d": lambda a, b: F.max_pool1d(a.flatten(2), 2).unsqueeze(-1),
    "pool_and_cat": lambda a, b: torch.cat([F.max_pool2d(a, 2), F.max_pool2d(b, 2)], 1),
}


class Moving(nn.Module):
    def __init__(self, name, move):
        super().__init__()
        self.a, self.b = activation_layer(name), activation_layer("constant")
        self.move = move
        with torch.no_grad():
            moved = move(self.a(activation()), self.b(activation(1)))
        torch.manual_seed(0)
        self.conv = nn.Conv2d(moved.shape[1], 5, 1)

    def forward(self, x):
        return self.conv(self.move(self.a(x), self.b(2 * x)))


QUANTIZERS = ("constant", "parameter", "parameter_per_channel", "shifted")
#: Pooling of a tensor that was moved before is followed if all its elements have one scale.
POOLED_AFTER_A_MOVE = ("max_pool1d", "max_pool_of_channels_last")


@pytest.mark.parametrize(
    ("move", "quantizer"),
    [
        (move, quantizer)
        for move in MOVES
        for quantizer in QUANTIZERS
        if move not in POOLED_AFTER_A_MOVE or quantizer != "parameter_per_channel"
    ],
)
def test_follow_gives_the_gradients_of_torch(move, quantizer):
    model = Moving(quantizer, MOVES[move])
    expected = gradients(model, activation())
    found = gradients(brevact.quantize_backward(model, StochBackward2bit, min_numel=0), activation())
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])
    assert torch.equal(expected[2]["conv.weight"], found[2]["conv.weight"])


def test_concatenations_keep_the_codes_of_their_parts_alone():
    model = brevact.quantize_backward(Moving("constant", MOVES["twice"]), StochBackward2bit, min_numel=0)
    x = activation()
    scales_and_zero_points = 2 * 2 * 4
    assert brevact.memory_report(model, x).saved_bytes == 2 * x.numel() * 4 // 8 + scales_and_zero_points


def test_follow_forgets_what_was_overwritten():
    act, weight = activation_layer("constant"), nn.Parameter(torch.randn(3, CHANNELS, 1, 1))
    x = activation().requires_grad_()
    grads = []
    for settings in (None, StochBackward2bit):
        weight.grad = None
        with brevact.backward_quant(settings, bit_width=8, min_numel=0) if settings else torch.enable_grad():
            y = F.pad(act(x), (1, 1))
            y += 3
            F.conv2d(y, weight).sum().backward()
        grads.append(weight.grad)
    step = (y.max() - y.min()) / 255
    assert (grads[0] - grads[1]).abs().max() <= step * y.numel() / CHANNELS < 3 * y.numel() / CHANNELS / 5
