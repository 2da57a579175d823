import copy
import inspect
import pickle

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8WeightPerTensorFloat, Uint8ActPerTensorFloat
from torch import nn

import brevact.nn as bnn
from brevact.autograd import BackwardSettings
from brevact.injectors import BackwardQuantProxy, StochasticRounding, StochBackward2bit
from brevact.nn.slot import BackwardSlot
from brevact.quantizers import UniformQuantizer

LAYERS = [getattr(bnn, name) for name in bnn.__all__]
layers = pytest.mark.parametrize("layer", LAYERS, ids=bnn.__all__)


class OwnReLU(bnn.ReLU):
    def __init__(self, slope: float, act_quant=None):
        super().__init__(act_quant=act_quant)
        self.slope = slope


class OwnLayer(BackwardSlot, nn.PReLU):
    """A layer of somebody else's with a slot."""


@layers
def test_layer_is_the_base_class_with_one_more_argument(layer):
    base = getattr(qnn if "Quant" in layer.__name__ else nn, layer.__name__)
    assert issubclass(layer, base)
    assert base.__name__ in layer.__doc__
    parameters = inspect.signature(layer).parameters
    assert parameters["act_quant"].kind is inspect.Parameter.KEYWORD_ONLY
    if base.__init__ is not nn.Module.__init__:
        named = [p for p in inspect.signature(base).parameters.values() if p.kind is not p.VAR_KEYWORD]
        assert [parameters[p.name] for p in named] == named


def test_prefixed_settings_reach_the_quantizer():
    layer = bnn.SiLU(act_quant=StochBackward2bit, act_bit_width=3, act_bucket_size=64, act_min_numel=5)
    assert layer.act_quant.settings == BackwardSettings(UniformQuantizer(bit_width=3, bucket_size=64), min_numel=5)


def test_slot_without_quantizer_is_a_plain_layer(saved_bytes):
    layer = bnn.SiLU(act_quant=None, act_bucket_size=64)
    x = torch.randn(4096, requires_grad=True)
    assert layer.act_quant is None
    assert not layer._forward_hooks and not layer._forward_pre_hooks
    assert saved_bytes(layer, x)[1] == x.nbytes
    assert repr(layer) == "SiLU()"


def test_shared_proxy_attaches_to_every_layer(saved_bytes):
    first = bnn.SiLU(act_quant=StochBackward2bit)
    second = bnn.GELU(act_quant=first.act_quant)
    x = torch.randn(4096, requires_grad=True)
    assert second.act_quant is first.act_quant
    assert saved_bytes(second, x)[1] == saved_bytes(first, x)[1] < x.nbytes / 10


def test_proxy_of_a_brevitas_layer_gives_its_settings():
    stock = qnn.QuantReLU(act_quant=StochBackward2bit, bucket_size=64)
    assert bnn.SiLU(act_quant=stock.act_quant).act_quant.settings == stock.act_quant.backward_quant.settings


def test_shared_proxy_cannot_be_changed():
    proxy = BackwardQuantProxy(BackwardSettings(UniformQuantizer()))
    with pytest.raises(ValueError, match="act_bit_width=3 cannot change act_quant, which is shared"):
        bnn.ReLU(act_quant=proxy, act_bit_width=3)


@pytest.mark.parametrize(
    ("act_quant", "message"),
    [
        (Int8WeightPerTensorFloat, "Int8WeightPerTensorFloat, which quantizes a weight or a bias"),
        (StochasticRounding, "is a fragment"),
        ("StochBackward2bit", "of type str"),
        (nn.ReLU(), "of type ReLU"),
    ],
)
@pytest.mark.parametrize("build", [bnn.ReLU, lambda **kwargs: bnn.QuantLinear(4, 4, **kwargs)])
def test_act_quant_refuses_other_types(build, act_quant, message):
    with pytest.raises(TypeError, match=message):
        build(act_quant=act_quant)


def test_act_quant_refuses_a_forward_quantizer_beside_it():
    with pytest.raises(ValueError, match=r"leave it out"):
        bnn.QuantConv2d(3, 4, 3, act_quant=StochBackward2bit, act_forward_quant=Uint8ActPerTensorFloat)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: bnn.SiLU(act_quant=StochBackward2bit, act_buket_size=64), "did you mean bucket_size"),
        (lambda: bnn.QuantLinear(4, 4, act_quant=StochBackward2bit, act_buket_size=64), "did you mean bucket_size"),
        (lambda: bnn.QuantLinear(4, 4, act_quant=StochBackward2bit, bucket_size=64), "did you mean act_bucket_size"),
        (lambda: bnn.QuantConv2d(4, 4, 3, imput_quant=None), "did you mean input_quant"),
        (lambda: bnn.QuantLSTM(4, 4, coupled_input_gates=True), "did you mean coupled_input_forget_gates"),
        (lambda: bnn.ReLU(act_quant=StochBackward2bit, bucket_size=64), "unexpected keyword argument 'bucket_size'"),
        (lambda: bnn.Sigmoid(bucket_size=64), "unexpected keyword argument 'bucket_size'"),
    ],
)
def test_unknown_keyword_raises(build, message):
    with pytest.raises(TypeError, match=message):
        build()


@pytest.mark.parametrize("typo", ["act_qaunt", "act_quat", "act_qunt"])
@pytest.mark.parametrize("build", [bnn.ReLU, lambda **kwargs: bnn.QuantLinear(8, 8, True, **kwargs)])
def test_misspelt_slot_raises(build, typo):
    expected = f"{typo}=.* is not an argument of .*did you mean act_quant|unexpected keyword argument '{typo}'"
    with pytest.raises(TypeError, match=expected):
        build(**{typo: StochBackward2bit})


def test_act_prefix_leaves_named_arguments_of_the_base_alone():
    class Base(nn.Module):
        def __init__(self, act_gain: float = 1.0):
            super().__init__()
            self.act_gain = act_gain

    class Slotted(BackwardSlot, Base):
        """A layer whose own argument begins like a setting."""

    assert Slotted(act_gain=2.0).act_gain == 2.0
    layer = Slotted(act_gain=3.0, act_quant=StochBackward2bit, act_bit_width=4)
    assert layer.act_gain == 3.0
    assert layer.act_quant.settings.quantizer.bit_width == 4


class OwnQuantizer:
    """The minimal quantizer for a region: nearest codes of an inner one."""

    is_stochastic = False

    def quantize(self, x, seed=None):
        return UniformQuantizer(bit_width=3, rounding="nearest").quantize(x)


def test_slot_takes_a_quantizer_of_ones_own(saved_bytes):
    layer = bnn.SiLU(act_quant=OwnQuantizer(), act_min_numel=0)
    expected = bnn.SiLU(act_quant=UniformQuantizer(bit_width=3, rounding="nearest"), act_min_numel=0)
    x = torch.randn(1024, requires_grad=True)
    grads, kept = [], []
    for each in (layer, expected):
        y, nbytes = saved_bytes(each, x * 1.0)
        kept.append(nbytes)
        grads.append(torch.autograd.grad(y.sum(), x)[0])
    assert kept[0] == kept[1] < x.nbytes / 5
    assert torch.equal(*grads)
    assert "OwnQuantizer" in repr(layer)


def test_setting_of_a_quantizer_that_is_no_dataclass_raises():
    with pytest.raises(TypeError, match="bucket_size=3 cannot change a OwnQuantizer"):
        bnn.ReLU(act_quant=OwnQuantizer(), act_bucket_size=3)


def test_subclass_keeps_its_own_signature():
    layer = OwnReLU(0.5, act_quant=StochBackward2bit)
    assert list(inspect.signature(OwnReLU).parameters) == ["slope", "act_quant"]
    assert layer.act_quant.settings == StochBackward2bit.backward_settings


def test_slot_joins_a_layer_class_with_a_constructor_of_its_own():
    class Scaled(BackwardSlot, nn.Linear):
        def __init__(self, features: int, factor: float = 2.0, **kwargs):
            super().__init__(features, features, **kwargs)
            self.factor = factor

    layer = Scaled(8, factor=3.0, bias=False, act_quant=StochBackward2bit, act_bit_width=4)
    assert layer.bias is None
    assert layer.factor == 3.0
    assert layer.act_quant.settings.quantizer.bit_width == 4
    assert list(inspect.signature(Scaled).parameters) == ["features", "factor", "act_quant", "kwargs"]


def test_slot_joins_any_layer_class(saved_bytes):
    torch.manual_seed(0)
    layer, plain = OwnLayer(num_parameters=8, act_quant=StochBackward2bit), nn.PReLU(num_parameters=8)
    x = torch.randn(4, 8, 16, 16)
    expected, plain_bytes = saved_bytes(plain, x)
    result, packed_bytes = saved_bytes(layer, x)
    assert torch.equal(result, expected)
    assert packed_bytes < plain_bytes / 5
    assert layer.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copied_layer_keeps_slot_and_region(copied, saved_bytes):
    layer = OwnReLU(0.5, act_quant=StochBackward2bit)
    twin = copied(layer)
    x = torch.randn(4096, requires_grad=True)
    assert twin.act_quant.settings == layer.act_quant.settings
    assert saved_bytes(twin, x)[1] == x.numel() // 8


def test_repr_shows_the_quantizer():
    assert "(act_quant): BackwardQuantProxy(UniformQuantizer, bit_width=2, rounding=stochastic" in repr(
        bnn.QuantConv2d(3, 4, 3, act_quant=StochBackward2bit)
    )


@pytest.mark.parametrize(
    "make", [lambda: bnn.ReLU(StochBackward2bit), lambda: bnn.QuantLinear(4, 4, StochBackward2bit)]
)
def test_a_quantizer_without_its_keyword_is_refused(make):
    with pytest.raises(TypeError, match="passed by keyword: act_quant=StochBackward2bit"):
        make()
