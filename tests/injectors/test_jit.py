"""Layers under ``BREVITAS_JIT=1``, which Brevitas reads when it is imported: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import brevact

SCRIPT = """
import brevact, brevitas.config, torch
import brevitas.nn as qnn
from brevitas.quant import Int8ActPerTensorFloat, Uint8ActPerTensorFloat
import brevact.nn as bnn
from brevact.injectors import StochBackward2bit

assert brevitas.config.JIT_ENABLED
torch.manual_seed(0)
x = torch.randn(4, 8, 16, 16)

def saved_bytes(layer, x):
    kept = {}
    def note(t):
        kept[t.untyped_storage().data_ptr()] = (t, t.untyped_storage().nbytes())
        return t
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = layer(x)
    return y, sum(n for _, n in kept.values())

relu = qnn.QuantReLU(act_quant=StochBackward2bit)
leaf = x.clone().requires_grad_()
y, kept = saved_bytes(relu, leaf)
y.sum().backward()
assert torch.equal(y, x.relu())
assert torch.equal(leaf.grad, (x > 0).float()), "the gradient of a ReLU is exact"
assert kept == x.nbytes, kept  # a region cannot see into the script

for build in (
    lambda q: bnn.QuantConv2d(8, 8, 3, act_quant=q, input_quant=Int8ActPerTensorFloat),
    lambda q: bnn.QuantConv2d(8, 8, 3, act_quant=q, weight_quant=None),
    lambda q: qnn.QuantConv2d(8, 8, 3, input_quant=q),
):
    torch.manual_seed(0)
    plain = build(None)
    torch.manual_seed(0)
    packed = build(StochBackward2bit)
    (expected, plain_bytes), (result, packed_bytes) = saved_bytes(plain, x), saved_bytes(packed, x)
    assert torch.equal(result, expected)
    assert packed_bytes < plain_bytes, (packed_bytes, plain_bytes)
    result.sum().backward()
    assert packed.weight.grad.isfinite().all()

stock = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat)
both = qnn.QuantReLU(act_quant=StochBackward2bit, forward_quant=Uint8ActPerTensorFloat)
assert torch.equal(both(x), stock(x))
assert both.state_dict().keys() == stock.state_dict().keys()

for quant in (Int8ActPerTensorFloat, Uint8ActPerTensorFloat):
    for policy in (brevact.DEFAULT, StochBackward2bit):
        torch.manual_seed(0)
        grads = []
        for own in (None, None, policy):  # the first run of a script is profiled, and has other last bits
            model = torch.nn.Sequential(qnn.QuantIdentity(act_quant=quant, bit_width=4))
            if own is not None:
                brevact.quantize_backward(model, own)
            leaf = x.clone().requires_grad_()
            y = model(leaf * 1.0)
            y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
            grads.append(leaf.grad)
        assert torch.equal(*grads[1:]), "scripted quantizers compare what they save"
"""


@pytest.mark.exhaustive
def test_layers_work_where_brevitas_scripts_its_quantizers():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "BREVITAS_JIT": "1", "PYTHONPATH": str(Path(brevact.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
