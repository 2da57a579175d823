from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact.quantizers import PackedActivation, UniformQuantizer, quantize

PACKED = UniformQuantizer(bit_width=4).quantize(torch.linspace(-1, 1, 4096), seed=0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda buffer: buffer[:16], id="short"),
        pytest.param(lambda buffer: torch.cat((buffer, buffer)), id="long"),
        pytest.param(lambda buffer: torch.stack((buffer, buffer), dim=1)[:, 0], id="strided"),
        pytest.param(lambda buffer: buffer[None], id="two dimensions"),
        pytest.param(lambda buffer: buffer.half(), id="float16"),
        pytest.param(lambda buffer: buffer.view(torch.int8), id="int8"),
    ],
)
def test_packed_activation_refuses_other_buffers(change):
    buffer = change(PACKED.buffer)
    with pytest.raises(
        ValueError, match=rf"buffer: got a {buffer.dtype} tensor .*accepted is a contiguous torch.uint8"
    ):
        PackedActivation(PACKED.spec, buffer)


def test_packed_activation_takes_an_equal_buffer():
    assert torch.equal(PackedActivation(PACKED.spec, PACKED.buffer.clone()).dequantize(), PACKED.dequantize())


def test_backward_names_hooks_that_changed_the_buffer():
    model = nn.Linear(64, 64)
    brevact.quantize_backward(model, brevact.NearestBackward4bit)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
        out = model(torch.randn(128, 64))
    with pytest.raises(ValueError, match=r"buffer: got a torch\.float32 tensor .*saved-tensor hooks"):
        out.sum().backward()


class _ReturnsATensor:
    is_stochastic = False

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> Tensor:
        return x.half()


def test_quantize_refuses_what_is_no_packed_activation():
    with pytest.raises(
        TypeError, match=r"_ReturnsATensor\.quantize returned a Tensor; accepted is a .*PackedActivation"
    ):
        quantize(_ReturnsATensor(), torch.randn(8), None)
