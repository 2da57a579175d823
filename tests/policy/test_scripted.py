"""Modules of `torch.jit` inside a model: any policy works, and the module around them opens the region."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import StochBackward2bit
from tests.autograd.measuring import watch_saved

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(64, 64), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) * 2


class Net(nn.Module):
    def __init__(self, convert: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.a, self.core, self.b = nn.Linear(64, 64), convert(Core()), nn.Sequential(nn.GELU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.core(self.a(x)))


KINDS = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.randn(2, 64)),
    "deep": lambda module: nn.Sequential(nn.Sequential(torch.jit.script(module))),
}
POLICIES = {
    "default": brevact.DEFAULT,
    "one": StochBackward2bit,
    "types": {nn.Linear: None, nn.Module: StochBackward2bit},
    "pattern": {"*.0": None, "*": StochBackward2bit},
    "function": {F.gelu: None, "*": StochBackward2bit},
    "lossless": brevact.LosslessBackward,
}


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_policy_works_beside_scripted_modules(kind, policy):
    torch.manual_seed(0)
    model, x = Net(KINDS[kind]), torch.randn(128, 64)
    plain = model(x)
    brevact.quantize_backward(model, POLICIES[policy])
    with watch_saved() as saved:
        out = model(x)
    assert torch.equal(out, plain)
    assert policy in ("lossless", "types") or not saved.holds(x)
    copy.deepcopy(model)(x).sum().backward()
    brevact.memory_report(model, x)
    brevact.restore_backward(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_reports_and_fit_measure_models_with_scripted_modules():
    torch.manual_seed(0)
    model, batches = Net(torch.jit.script), [torch.randn(128, 64) for _ in range(2)]
    policy = brevact.fit(model, batches, mean_square, ratio=1.5, progress=False)
    assert brevact.quantize_backward(Net(torch.jit.script), policy)
    report = brevact.gradient_report(model, batches, mean_square, StochBackward2bit, draws=2, progress=False)
    assert report.noise > 0


@pytest.mark.parametrize("policy", [brevact.DEFAULT, StochBackward2bit, {"*": StochBackward2bit}])
@pytest.mark.parametrize("kind, name", [("script", "RecursiveScriptModule"), ("trace", "TopLevelTracedModule")])
def test_a_scripted_model_is_refused_by_name_with_advice_that_works(kind, name, policy):
    core, x = KINDS[kind](Core()), torch.randn(128, 64, requires_grad=True)
    with pytest.raises(TypeError, match=rf"model: got a {name} \(Core\).*nn\.Sequential\(model\).*backward_quant"):
        brevact.quantize_backward(core, policy)
    assert not any(module._forward_pre_hooks for module in core.modules())
    plain = core(x)
    assert torch.equal(brevact.quantize_backward(nn.Sequential(core), policy)(x), plain)
    with brevact.backward_quant():
        assert torch.equal(core(x), plain)
