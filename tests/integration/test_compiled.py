"""Memory orders in compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import brevact
from brevact import NearestBackward4bit, NearestBackward8bit
from brevact.quantizers import pack_mask, to_text


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("function", [F.silu, F.gelu, F.mish, F.relu, F.leaky_relu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strides_that_the_compiler_foretells_wrongly_do_no_harm(function, dtype):
    leaf = NearestBackward8bit.let(min_numel=0, derive_min_bits=0)  # in a closure, whose `__code__` Dynamo reads

    def run(x: Tensor) -> Tensor:
        with brevact.backward_quant(leaf):
            return function(x)

    x = torch.randn(4, 8, 6, 6).to(dtype=dtype, memory_format=torch.channels_last).requires_grad_()
    exact = torch.autograd.grad(function(x).sum(), x)[0]
    found = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(x).sum(), x)[0]
    # half a step of a derivative between -0.2 and 1.2, and its rounding to the dtype
    assert (found - exact).abs().max() <= 0.51 * 1.4 / 255 + torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (1, 4, 1, 6), (0, 4, 5, 6)])
def test_ops_pack_in_the_order_that_they_were_traced_with(shape):
    quantizer = brevact.quantizer(NearestBackward4bit, bucket_size=16)
    x = torch.randn(shape)
    forms = (x, x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0))
    for traced in forms:
        expected = quantizer.quantize(traced).buffer
        mask = pack_mask(traced > 0)
        for run in forms:
            assert torch.equal(torch.ops.brevact.quantize(run, None, to_text(quantizer), traced.stride()), expected)
            assert torch.equal(torch.ops.brevact.pack_mask(run > 0, traced.stride()), mask)
    rows, spread = torch.randn(3, 1, 5), (5, 0, 1)  # traced as expanded, run as a copy
    found = torch.ops.brevact.quantize(rows.expand(3, 4, 5).contiguous(), None, to_text(quantizer), spread)
    assert torch.equal(found, quantizer.quantize(rows).buffer)
