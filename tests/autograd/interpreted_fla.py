"""Kernels of flash-linear-attention, by the table: run where Triton interprets them (TRITON_INTERPRET=1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from brevact.autograd.interop.library_functions import SETS, is_exact_alone
from brevact.autograd.interop.other_code import name_of
from tests.autograd.library_stand_ins import weight
from tests.autograd.test_library_functions import activation, check_gradients

Autotuner.do_bench = lambda *arguments, **options: (1.0, 1.0, 1.0)  # there is no GPU to time kernels on
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of no GPU
    from fla.modules import activations, fused_norm_gate, l2norm, layernorm
    from fla.modules.fused_cross_entropy import cross_entropy_loss
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

TARGETS = torch.arange(64) % 128
#: Functions of one (64, 128) tensor.
CALLS: list[Callable[[Tensor], Tensor]] = [
    lambda x: layernorm.layer_norm(x, weight(x, 128), weight(x, 128, seed=6)),
    lambda x: layernorm.rms_norm(x, weight(x, 128), None),
    lambda x: layernorm.layer_norm_linear(x, None, None, weight(x, 64, 128), None),
    lambda x: l2norm.l2_norm(x),
    lambda x: activations.swish(x),
    lambda x: activations.swiglu(x, x.detach() + 1),
    lambda x: activations.swiglu_linear(x, x.detach() + 1, weight(x, 64, 128), None),
    lambda x: fused_norm_gate.layer_norm_swish_gate_linear(
        x, x.detach() + 1, weight(x, 128), weight(x, 128, seed=6), weight(x, 64, 128), None
    ),
    lambda x: fused_linear_cross_entropy_loss(x, TARGETS, weight(x, 128, 128)),
    lambda x: cross_entropy_loss(x, TARGETS)[0].sum(),
]


if __name__ == "__main__":
    for call in CALLS:
        node = call(activation() * 1.0).grad_fn
        while not type(node).__name__.endswith("FunctionBackward"):
            node = node.next_functions[0][0]  # behind a view or a sum
        path = name_of(type(node)._forward_cls)
        assert path in SETS, path
        if not is_exact_alone(path):
            check_gradients(call, 16)
