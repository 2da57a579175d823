"""Programs of ATen's operators train in regions."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import brevact
from brevact import DEFAULT, LosslessBackward
from tests.autograd.measuring import kept_bytes, watch_saved


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.attended, self.out = nn.Linear(8, 24), nn.Linear(8, 10)
        self.register_buffer("target", torch.rand(16, 10))

    def forward(self, x):
        x = F.relu(x + F.dropout(F.silu(self.norm(self.conv(x)), inplace=True), 0.2))
        query, key, value = self.attended(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        x = F.gelu(F.scaled_dot_product_attention(query, key, value))
        return F.cross_entropy(self.out(x.mean(1)), self.target.softmax(1))


@pytest.mark.parametrize("policy", [DEFAULT, brevact.RECOMPUTE, LosslessBackward])
def test_exported_programs_have_gradients_within_their_noise(policy):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(16, 8, 16, 16)
    program, results = torch.export.export(model, (x,)).module(), []
    for chosen in (None, policy):
        each = copy.deepcopy(program)
        if chosen is not None:
            brevact.quantize_backward(each, chosen)
        torch.manual_seed(1)
        kept = kept_bytes(each, lambda each=each: each(x))
        torch.manual_seed(1)
        loss = each(x)
        loss.backward()
        results.append((loss, kept, torch.cat([p.grad.flatten() for p in each.parameters()])))
    (plain, kept_plainly, expected), (loss, kept, found) = results
    assert torch.equal(loss, plain)
    if policy is LosslessBackward:
        assert torch.equal(found, expected)
    else:
        assert 0 < (found - expected).norm() < 0.5 * expected.norm()
    assert kept <= kept_plainly


def test_buffers_of_a_program_in_a_block_are_weights():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * self.scale

    scaled, x = Scaled(), torch.randn(64, 100, requires_grad=True)
    scaled.register_buffer("scale", torch.randn(64, 100))
    program = torch.export.export(nn.Sequential(scaled), (x,)).module()
    with watch_saved() as saved, brevact.backward_quant():
        program(x)
    assert saved.holds(program.get_buffer("0.scale"))
