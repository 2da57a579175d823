"""Quantizers of Brevitas in a model with a policy: their insides, which models share, are left alone."""

from __future__ import annotations

import brevitas.nn as qnn
import pytest
import torch
from brevitas.core.function_wrapper import RoundSte
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat
from torch import Tensor, nn

import brevact
from brevact import StochBackward2bit
from brevact.autograd import has_region
from brevact.autograd.region.module_hooks import regions_of
from brevact.policy.rules import layers_of
from tests.crosses import taking_turns

RECURRENT = {
    "weight_quant": Int8WeightPerTensorFloat,
    "io_quant": Int8ActPerTensorFloat,
    "gate_acc_quant": Int8ActPerTensorFloat,
}


class OwnRound(RoundSte):
    """A part of a quantizer by a user."""


ROUND = OwnRound()


class SharedRound(Int8ActPerTensorFloat):
    float_to_int_impl = ROUND  # one instance for all layers


class WithParts(nn.Module):
    """Keeps parts of its quantizer under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = qnn.QuantLinear(64, 64, input_quant=Int8ActPerTensorFloat, weight_quant=Int8WeightPerTensorFloat)
        quantizer = self.layer.input_quant.fused_activation_quant_proxy
        self.parts = nn.ModuleList([quantizer, quantizer.tensor_quant, quantizer.tensor_quant.int_quant])
        self.clamp = quantizer.tensor_quant.int_quant.tensor_clamp_impl
        self.plain = nn.ModuleList(each for each in quantizer.modules() if type(each).__module__.startswith("torch."))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def linear(**settings) -> nn.Module:
    return qnn.QuantLinear(64, 64, weight_quant=Int8WeightPerTensorFloat, input_quant=Int8ActPerTensorFloat, **settings)


def recurrent(kind: type[nn.Module]) -> nn.Module:
    model = kind(32, 64, batch_first=True, **RECURRENT)
    model(torch.randn(8, 5, 32))  # makes the cell that holds quantizers without their proxies
    return model


MODELS = {
    "LSTM": lambda: recurrent(qnn.QuantLSTM),
    "RNN": lambda: recurrent(qnn.QuantRNN),
    "list": WithParts,
    "linear": linear,
    "attention": lambda: qnn.QuantMultiheadAttention(64, 4),
}


POLICIES = (StochBackward2bit, {nn.Module: StochBackward2bit}, brevact.DEFAULT)


@pytest.mark.parametrize("name, policy", taking_turns(list(MODELS), POLICIES))
def test_a_policy_never_touches_quantizers_which_other_models_share(name, policy):
    model, others = MODELS[name](), [MODELS[each]() for each in MODELS]
    brevact.quantize_backward(model, policy)
    for other in others:
        assert not any(map(regions_of, other.modules()))
        brevact.quantize_backward(other, StochBackward2bit)
        brevact.restore_backward(other)
    assert has_region(model, "policy")
    brevact.restore_backward(model)
    assert not any(map(regions_of, model.modules()))


def test_another_model_stores_what_it_stores_alone():
    x = torch.randn(128, 64)
    alone = brevact.memory_report(brevact.quantize_backward(linear(), StochBackward2bit), x).saved_bytes
    brevact.quantize_backward(recurrent(qnn.QuantLSTM), brevact.LosslessBackward)
    model = brevact.quantize_backward(linear(), StochBackward2bit)
    assert brevact.memory_report(model, x).saved_bytes == alone


def test_parts_by_a_user_that_layers_share_are_left_alone():
    model = nn.Sequential(linear(), linear())
    model[0].input_quant = qnn.QuantIdentity(SharedRound).act_quant
    model.rounding = ROUND
    brevact.quantize_backward(model, StochBackward2bit)
    assert not regions_of(ROUND) and "rounding" not in {
        row.module for row in brevact.backward_policy(model).rows if row.rule
    }


@pytest.mark.parametrize("kind", [qnn.QuantLSTM, qnn.QuantRNN])
def test_a_fitted_policy_knows_a_recurrent_model_before_and_after_its_first_forward(kind):
    model, fresh = recurrent(kind), kind(32, 64, batch_first=True, **RECURRENT)
    assert layers_of(model) == layers_of(fresh)
    policy = brevact.Policy({"*": StochBackward2bit}, layers=layers_of(model))
    assert brevact.quantize_backward(fresh, policy) is fresh
