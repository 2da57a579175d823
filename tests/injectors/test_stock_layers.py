"""``act_quant=`` with a backward quantizer on Brevitas' own layers: the same as on those of ``brevact.nn``."""

import copy
import pickle

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat

import brevact.nn as bnn
from brevact import BackwardSettings, StochBackward2bit, UniformQuantizer
from brevact.autograd import has_region
from brevact.injectors.stock_layers import _layers
from tests.autograd.measuring import watch_saved
from tests.nn.test_quant_layers import CASES, build, forward

cases = pytest.mark.parametrize("name", CASES)


def gradients_of(layer, name, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(CASES[name][2], requires_grad=True)
    torch.manual_seed(seed)
    y = forward(layer, x + 0)  # an activation
    y.sin().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def test_every_stock_layer_that_takes_quantizers_has_the_slot():
    named = {kind.__name__ for kind in _layers()}
    assert named >= {*CASES, "QuantEmbedding", "QuantEltwiseAdd", "QuantCat"}


@cases
def test_stock_layer_gives_the_gradients_of_its_namesake(name):
    settings = {"act_quant": StochBackward2bit, "act_bucket_size": 64, "act_min_numel": 0}
    stock, ours = (build(module, name, **settings) for module in (qnn, bnn))
    assert stock.act_quant.settings == ours.act_quant.settings and has_region(stock)
    for found, expected in zip(gradients_of(stock, name), gradients_of(ours, name), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)


@cases
def test_stock_layer_keeps_state_and_copies(name):
    plain, packed = build(qnn, name), build(qnn, name, act_quant=StochBackward2bit)
    assert type(packed) is type(plain)
    assert packed.state_dict().keys() == plain.state_dict().keys()
    for each in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert has_region(each) and each.act_quant.settings == packed.act_quant.settings
        for found, expected in zip(gradients_of(each, name), gradients_of(packed, name), strict=True):
            assert (found is None and expected is None) or torch.equal(found, expected)
        packed.zero_grad()


def test_layers_that_merge_take_the_slot():
    layer = qnn.QuantEltwiseAdd(act_quant=StochBackward2bit, act_bit_width=4)
    x = torch.randn(16, 8, 64, requires_grad=True)
    layer(x + 0, x * 2).sum().backward()
    assert layer.act_quant.settings.quantizer.bit_width == 4 and torch.isfinite(x.grad).all()
    # Its forward calls QuantTensor.cat, which Brevitas 0.13.4 does not have, with or without the slot.
    assert has_region(qnn.QuantCat(act_quant=StochBackward2bit))


@pytest.mark.parametrize(
    "source", [StochBackward2bit, UniformQuantizer(bit_width=2), BackwardSettings(UniformQuantizer(bit_width=2))]
)
def test_slot_takes_every_kind_of_backward_quantizer(source):
    first = qnn.QuantLinear(64, 64, bias=False, act_quant=source)
    shared = qnn.QuantLinear(64, 64, bias=False, act_quant=first.act_quant)
    assert shared.act_quant is first.act_quant
    with watch_saved() as saved:
        shared(first(torch.randn(512, 64) * 1.0).tanh())
    assert sum(t.dtype is torch.uint8 for t in saved.tensors) == 2


@pytest.mark.parametrize("source", [None, Int8ActPerTensorFloat])
def test_without_a_backward_quantizer_the_layer_is_that_of_brevitas(source):
    layer = qnn.QuantConv2d(3, 8, 3, act_quant=source, act_bit_width=4)
    assert not has_region(layer) and not hasattr(layer, "act_quant")
