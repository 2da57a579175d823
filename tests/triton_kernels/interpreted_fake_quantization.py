"""Interpreted kernels under the Functions that fake-quantize: Brevitas' bits; see `test_interpreted`."""

from __future__ import annotations

import pytest
import torch

from brevact import LosslessBackward, StochBackward2bit, triton_kernels
from brevact.cpu_kernels import launch
from brevact.quantizers import backends
from brevact.triton_kernels.floats import rint
from brevact.triton_kernels.launch import Program
from tests.qat.test_one_pass import LAYERS, SHAPES, activation, check
from tests.qat.test_one_pass_types import compare
from tests.qat.test_one_pass_types import layer as layer_of_type


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """Run the GPU's kernels on the CPU; return their names, in order."""
    names = []
    run = Program.run
    monkeypatch.setattr(triton_kernels, "can_run", launch.can_run)
    monkeypatch.setattr(backends, "_launchers", lambda on_gpu: triton_kernels)
    monkeypatch.setattr(Program, "run", lambda self, *x: (names.append(self.kernel.__name__), run(self, *x)))
    return names


@pytest.mark.parametrize("shape", ["ragged", "ones"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_brevitas(name, shape, ran):
    x, relu = activation(SHAPES[shape]), len(name) % 2 == 0
    check(name, x, activation(x.shape, 5), relu=relu, min_numel=0)
    check(name, x, activation(x.shape, 5), relu=not relu, policy=StochBackward2bit, min_numel=0)
    assert ran.count("fake_quantize_kernel") == ran.count("fake_quantize_backward_kernel") == 2


def test_channels_last_activations(ran):
    x, grad = (activation(SHAPES["ragged"], seed).contiguous(memory_format=torch.channels_last) for seed in (9, 5))
    for name in ("uint4", "per_channel"):
        check(name, x, grad, relu=True, min_numel=0)
    assert ran.count("fake_quantize_backward_kernel") == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_16_bits_are_those_of_brevitas(dtype, ran):
    x, grad = activation(SHAPES["ragged"]).to(dtype), activation(SHAPES["ragged"], 5).to(dtype)
    for policy in (LosslessBackward, StochBackward2bit):
        compare(lambda: layer_of_type("uint4", relu=True).to(dtype), x, grad, policy)
    assert ran.count("fake_quantize_backward_kernel") == 2


def test_rint_rounds_any_number_half_to_even():
    tl = pytest.importorskip("triton.language")
    import triton

    @triton.jit
    def kernel(x_ptr, y_ptr, N: tl.constexpr):
        place = tl.arange(0, N)
        tl.store(y_ptr + place, rint(tl.load(x_ptr + place)))

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 14,), generator=generator, dtype=torch.int64).to(torch.int32)
    halves = torch.arange(-(2**13), 2**13) / 2
    for x in (bits.view(torch.float32), halves, halves * 2.0**10 + 0.5, 2.0**22 + halves):
        y = torch.empty_like(x)
        kernel[(1,)](x, y, len(x))
        wanted = x.round()
        assert torch.equal(y.view(torch.int32)[~x.isnan()], wanted.view(torch.int32)[~x.isnan()])
        assert y[x.isnan()].isnan().all()
