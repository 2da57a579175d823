"""Where the time of a step goes: tables whose figures add up, of a small net."""

import torch
from torch import nn

from benchmarks.step_costs import PHASES, costs
from brevact.autograd import mode
from brevact.cpu_kernels import quantize
from recipes.policy_names import named_policy


def _small():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(4, 3, 16, 16)
    return model, lambda: model(x).square().mean()


def test_costs_of_phases_calls_and_kernels():
    share, call = quantize.share, mode.EagerMode.__torch_function__
    phases, calls, kernels = costs(_small, named_policy("StochBackward4bit:min_numel=0"), rounds=1)
    found = {row["phase"]: row for row in phases}
    for kind in ("plain", "packed"):
        # Each of four figures is rounded to a tenth.
        assert abs(sum(float(found[phase][kind]) for phase in PHASES) - float(found["step"][kind])) <= 4 * 0.05 + 1e-9
    assert {"conv2d", "batch_norm", "silu"} <= {row["forward call"] for row in calls}
    # The input of the first convolution and that of the norm are packed.
    assert {row["kernel"]: row["calls"] for row in kernels}["quantize_blocks"] == 2
    assert quantize.share is share and mode.EagerMode.__torch_function__ is call
