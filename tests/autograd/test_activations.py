"""Activation functions and dropout: graphs that are kept, second derivatives and wrong arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from brevact.autograd import SaveMode, region
from tests.autograd.measuring import assert_graph_is_kept_and_refuses_a_second_derivative, settings


@pytest.mark.parametrize(
    "function",
    [nn.GLU(), nn.PReLU(), torch.abs, nn.Softsign(), lambda x: F.rrelu(x, training=True), nn.AlphaDropout(0.2)],
)
@pytest.mark.parametrize("mode", SaveMode)
def test_graphs_are_kept_and_refuse_a_second_derivative(function, mode):
    assert_graph_is_kept_and_refuses_a_second_derivative(function, torch.randn(8, 6, requires_grad=True), mode)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.prelu(x, torch.ones(5)),
        lambda x: F.prelu(x, torch.ones(1, dtype=torch.float64)),
        lambda x: F.glu(x, 1),
        lambda x: F.glu(x, 4),
        lambda x: F.rrelu(x, 0.5, 0.1, training=True),
        lambda x: F.softshrink(x, -1.0),
        lambda x: F.softsign(x, 3),
        lambda x: F.dropout(x, 0.3, None),
        lambda x: torch.dropout(x, 0.3, train=None),
    ],
)
def test_wrong_arguments_get_torchs_own_error(call):
    x = torch.randn(4, 3, 6, requires_grad=True)
    with pytest.raises(Exception) as expected:
        call(x)
    with pytest.raises(type(expected.value)) as raised, region(settings()):
        call(x)
    assert str(raised.value).split("\n")[0] == str(expected.value).split("\n")[0]
