"""The warning that a model with a policy got gradients of a step that packed nothing."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import LosslessBackward, SaveMode, StochBackward2bit, StochBackward4bit
from brevact.policy import attach


@pytest.fixture(autouse=True)
def _afresh(monkeypatch):
    monkeypatch.setattr(attach._Watch, "warned", False)
    monkeypatch.setattr(attach, "has_compiled", lambda: False)  # of other tests of this process


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


X = torch.randn(4, 8)


def packed(policy=StochBackward4bit) -> nn.Module:
    return brevact.quantize_backward(net(), policy)


def message_of(step) -> str:
    """The warning of a step, "" without one."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step()
    told = [each for each in found if "backward policy" in str(each.message)]
    texts = [str(each.message) for each in told]
    assert len(texts) <= 1
    assert {each.filename for each in told} <= {__file__}
    return texts[0] if texts else ""


def train(model: nn.Module, call) -> str:
    return message_of(lambda: call(model).sum().backward())


def test_a_forward_that_is_not_called_through_the_module_is_told():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))

        def forward(self, x):
            return x @ self.weight

    model = brevact.quantize_backward(Direct(), StochBackward4bit)
    found = train(model, lambda model: model.forward(X))
    assert "Direct has a backward policy" in found and "with brevact.backward_quant(model)" in found
    assert not train(model, lambda model: model.forward(X))  # once a process


def test_eval_mode_with_gradients_is_told():
    found = train(packed().eval(), lambda model: model(X))
    assert "eval mode" in found and "model.train()" in found


def test_the_log_has_it_too(caplog):
    train(packed().eval(), lambda model: model(X))
    assert [record.levelname for record in caplog.records if "eval mode" in record.message] == ["WARNING"]


QUIET = {
    "call": lambda model: model(X),
    "a part": lambda model: model[0](X),
    "a forward whose parts are called": lambda model: model.forward(X),
    "checkpoint": lambda model: checkpoint(model, X, use_reentrant=False),
    "two forwards, one backward": lambda model: model(X) + model(X),
}


@pytest.mark.parametrize("call", QUIET)
@pytest.mark.parametrize(
    "policy",
    [
        StochBackward4bit,
        LosslessBackward,
        StochBackward2bit.let(save_mode=SaveMode.QUANTIZE_ON_BACKWARD),
        brevact.DEFAULT,
    ],
    ids=["four", "lossless", "on backward", "default"],
)
def test_steps_that_enter_a_region_are_quiet(policy, call):
    assert not train(packed(policy), QUIET[call])


def test_blocks_and_second_backward_passes_are_quiet():
    model = packed().eval()

    def step():
        with brevact.backward_quant(model):
            loss = model.forward(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert not message_of(step)


def test_full_precision_reports_and_restored_models_are_quiet():
    model = packed({"*": None})
    assert not train(model.eval(), lambda model: model(X))
    model, loss = packed(), lambda model, batch: model(batch).square().mean()
    batches = [torch.randn(4, 8) for _ in range(2)]
    report = lambda: (brevact.memory_report(model, X), brevact.gradient_report(model, batches, loss, draws=2))  # noqa: E731
    assert not message_of(report)
    brevact.restore_backward(model)
    assert not train(model.eval(), lambda model: model(X))
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_models_are_copied_and_moved_as_before(copied):
    model = packed()
    twin = copied(model)
    assert not train(twin, lambda model: model(X))
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(8, 8)))
    assert not train(model.double(), lambda model: model(X.double()))
