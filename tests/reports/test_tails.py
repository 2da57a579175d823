"""Massive activations: noise at `DEFAULT`, and the layers that `gradient_report` names."""

import math
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import brevact
from brevact.reports.gradients import tails_of_inputs

WIDTH, VOCABULARY = 256, 256
IDS = torch.randint(VOCABULARY, (2, 128), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def llama(channels, times, blocks=4):
    """A small Llama, embeddings of whose first channels are so many times the others."""
    torch.manual_seed(0)
    body = [Block() for _ in range(blocks)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *body, nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        model[0].weight[:, 7 : 7 + channels] *= times
    return model


def loss(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def error(model, policy=brevact.DEFAULT):
    """Relative error of the gradient, of two draws."""

    def gradients(step):
        model.zero_grad()
        with step:
            loss(model, IDS).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    exact = gradients(nullcontext())
    brevact.quantize_backward(model, policy)
    squares = [(gradients(brevact.backward_quant(model)) - exact).square().sum() for _ in range(2)]
    brevact.restore_backward(model)
    return math.sqrt(sum(squares) / 2 / exact.square().sum())


@pytest.mark.parametrize("policy", [brevact.DEFAULT, brevact.RECOMPUTE], ids=["default", "recompute"])
def test_massive_channels_at_most_double_the_noise(policy):
    ordinary = error(llama(1, 1), policy)
    for channels, times in ((1, 50), (2, 1000)):
        assert error(llama(channels, times), policy) <= 2 * ordinary


def test_gradient_report_names_heavy_tails_and_a_rule_that_cures_their_noise():
    model = llama(2, 1000, blocks=1)
    report = brevact.gradient_report(model, [IDS, IDS.flip(0) * 3 % VOCABULARY], loss, draws=2, progress=False)
    tails = {row.layer: row.tail for row in report.rows}
    assert tails["2"] > 100 and tails["1.out"] < 30
    assert " tail\n" in str(report) and "1.norm_1, " in report.notes[-1]
    layer = re.search(r"let\(\{'(.*)': brevact.DitherBackward6bit\}\)", report.notes[-1])[1]
    assert layer == "2"  # the norm before the head
    cured = brevact.DEFAULT.let({layer: brevact.DitherBackward6bit})
    assert error(model, cured) < error(model) / 2


def test_gradient_report_of_ordinary_activations_has_no_column_of_tails():
    report = brevact.gradient_report(llama(1, 1, blocks=1), [IDS], loss, draws=2, layers=None, progress=False)
    assert "tail" not in str(report) and all(row.tail < 5 for row in report.rows if not math.isnan(row.tail))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_tails_of_inputs_take_any_tensor(value):
    x = torch.ones(8, 64)
    x[0, 0] = value
    with tails_of_inputs(layer := nn.Identity()) as found:
        for each in (x, x.half(), x.to_sparse(), torch.nested.nested_tensor([x, x]), x.long(), x[:0], None):
            layer(each)
    assert found == {"": 1.0 if math.isnan(value) else math.inf}
