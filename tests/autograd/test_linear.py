from __future__ import annotations

import torch
from torch import nn

import brevact
from tests.autograd.leaves import every_leaf


@every_leaf
def test_linear_layers_take_any_number_of_axes_and_memory_order(leaf):
    layer = brevact.quantize_backward(nn.Linear(8, 5), leaf, min_numel=0)
    for x in (torch.randn(8), torch.randn(2, 3, 8), torch.randn(2, 8, 4, 6).to(memory_format=torch.channels_last)):
        x = (x if x.dim() < 4 else x.permute(0, 2, 3, 1)).requires_grad_()
        grad = torch.autograd.grad(layer(x).sum(), x)[0]
        torch.testing.assert_close(grad, layer.weight.sum(0).expand(x.shape))
