"""Each module of torch's own database with backward quantization: the laws of the operators, and bit-equal buffers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_flatten, tree_map

import brevact
from brevact import BackwardSettings
from tests.autograd.database_laws import Outcome, broken_laws, dense, loss_of
from tests.autograd.op_database import MISSING

try:
    from torch.testing._internal.common_modules import module_db
except ImportError:
    module_db = []

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

#: Modules whose gradients the bound at 8 bits does not hold for, with the reason.
LIMITS: dict[str, tuple[set[str], str]] = {}


def run(module: nn.Module, forward: Any, settings: BackwardSettings | None, seed: int) -> Outcome:
    module = copy.deepcopy(module)
    if settings is not None:
        brevact.quantize_backward(module, settings)
    leaves: list[Tensor] = []

    def enter(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        if not x.requires_grad:
            return x.detach().clone()
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1].clone()

    args, kwargs = tree_map(enter, (forward.args, forward.kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        outputs = [x for x in tree_flatten(module(*args, **kwargs))[0] if isinstance(x, Tensor)]
        loss = loss_of(outputs)
        variables = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
        grads = [] if loss is None or not variables else torch.autograd.grad(loss, variables, allow_unused=True)
    scale = sum(x.numel() for x in outputs if x.requires_grad) ** 0.5
    results = [*(x.detach() for x in outputs), *module.buffers()]
    return Outcome(results, [None if x is None else dense(x) for x in grads], scale)


def laws_broken_by(module: nn.Module, forward: Any) -> list[str]:
    if isinstance(module, LazyModuleMixin):
        module(*forward.args, **forward.kwargs)  # which gives it its parameters
    return broken_laws(lambda settings, seed: run(module, forward, settings, seed), is_large=False, is_exact=False)


def check(info: Any, is_training: bool, most: int | None) -> None:
    torch.manual_seed(0)
    allowed: set[str] = LIMITS.get(info.name, (set(), ""))[0]
    found = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=is_training)
    broken = {}
    for i, sample in enumerate(list(found)[:most]):
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).float()
        laws = laws_broken_by(module.train(is_training), sample.forward_input)
        broken[f"{i} {sample.desc}"] = [law for law in laws if law not in allowed]
    assert broken and not any(broken.values())


def test_the_laws_are_checked_for_as_many_modules_as_promised():
    names = {info.name for info in module_db}
    assert len(names - LIMITS.keys()) >= min(len(names), 114)  # PyTorch 2.11 has 113


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_a_sample_of_each_module_keeps_the_laws(info):
    check(info, True, most=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_samples_of_modules_keep_the_laws(info, is_training):
    check(info, is_training, most=None)
