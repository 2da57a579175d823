"""Modules that hold nothing and that models share, as the SiLU that all convolutions of a library have by default."""

import copy

import pytest
import torch
from torch import nn

import brevact
from brevact import NearestBackward4bit, StochBackward2bit, StochBackward8bit
from tests.autograd.measuring import watch_saved


class Convolution(nn.Module):
    default_act = nn.SiLU()

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.act = self.default_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Convolution(3, 16), Convolution(16, 8))


def gradients(model: nn.Module) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(1)
    model.zero_grad()
    with watch_saved() as saved:
        out = model(torch.randn(4, 3, 24, 24))
    out.square().sum().backward()
    return [p.grad.clone() for p in model.parameters()], saved.nbytes


@pytest.fixture(autouse=True)
def bare():
    yield
    assert not Convolution.default_act._forward_pre_hooks and not Convolution.default_act._forward_hooks


@pytest.mark.parametrize("policy", [brevact.DEFAULT, NearestBackward4bit, {"*": StochBackward2bit}])
def test_a_policy_leaves_another_model_alone(policy):
    expected = [
        gradients(brevact.quantize_backward(copy.deepcopy(net()), each)) for each in (policy, StochBackward8bit)
    ]
    plain = gradients(net())
    first, second, third = (net() for _ in range(3))
    brevact.quantize_backward(first, policy)
    brevact.quantize_backward(second, StochBackward8bit)
    for model, (grads, nbytes) in zip((first, second, third), (*expected, plain), strict=True):
        found, kept = gradients(model)
        assert all(map(torch.equal, found, grads)) and kept == nbytes
    with pytest.raises(ValueError, match="already has a backward policy"):
        brevact.quantize_backward(first, policy)
    brevact.restore_backward(second)
    assert all(map(torch.equal, gradients(second)[0], plain[0]))
    assert all(map(torch.equal, gradients(first)[0], expected[0][0]))
    brevact.restore_backward(first)
    assert all(map(torch.equal, gradients(first)[0], plain[0]))


def test_two_policies_hold_for_a_function_that_both_models_were_given():
    act = nn.SiLU()
    models = [nn.Sequential(nn.Linear(64, 64), act, nn.Linear(64, 64)) for _ in range(2)]
    alone = [copy.deepcopy(model) for model in models]
    policies = ({nn.SiLU: NearestBackward4bit, "*": StochBackward2bit}, StochBackward8bit)
    for model, other, policy in zip(models, alone, policies, strict=True):
        brevact.quantize_backward(model, policy)
        brevact.quantize_backward(other, policy)
    x = torch.randn(128, 64)
    for model, other in zip(models, alone, strict=True):
        grads = []
        for each in (model, other):
            torch.manual_seed(1)
            each(x).square().sum().backward()
            grads.append([p.grad for p in each.parameters()])
        assert all(map(torch.equal, *grads))
    for model in reversed(models):
        brevact.restore_backward(model)
    assert not act._forward_pre_hooks and not act._forward_hooks
