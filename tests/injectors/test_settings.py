import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Int16Bias, Uint8ActPerTensorFloat
from brevitas.quant.scaled_int import TruncTo8bit
from torch import nn

from brevact.autograd import BackwardSettings, SaveMode
from brevact.injectors import (
    BackwardQuantSolver,
    NearestBackward4bit,
    SaveQuantized,
    StochasticRounding,
    StochBackward2bit,
    UniformBuckets,
    backward_settings_from,
)
from brevact.quantizers import UniformQuantizer


def test_backward_settings_from_injector_applies_overrides():
    settings = backward_settings_from(
        StochBackward2bit, bit_width=3, bucket_size=64, save_mode=SaveMode.QUANTIZE_ON_BACKWARD, min_numel=0
    )
    assert settings == BackwardSettings(
        UniformQuantizer(bit_width=3, bucket_size=64), save_mode=SaveMode.QUANTIZE_ON_BACKWARD, min_numel=0
    )


def test_backward_settings_from_settings_applies_overrides():
    settings = BackwardSettings(UniformQuantizer(bit_width=2), min_numel=7)
    changed = backward_settings_from(settings, bit_width=4, save_mode="quantize_on_backward")
    assert changed == BackwardSettings(
        UniformQuantizer(bit_width=4), save_mode=SaveMode.QUANTIZE_ON_BACKWARD, min_numel=7
    )


def test_backward_settings_from_settings_refuses_a_typo():
    settings = StochBackward2bit.backward_settings
    assert isinstance(hash(settings), int)  # cached from here on
    with pytest.raises(TypeError, match="did you mean bucket_size") as raised:
        backward_settings_from(settings, buket_size=3)
    assert str(raised.value).startswith("buket_size=3 is not a setting of UniformQuantizer")
    assert "hash" not in str(raised.value)
    with pytest.raises(TypeError, match="_hash=3 is not a setting"):
        backward_settings_from(settings, _hash=3)


def test_backward_settings_from_refuses_settings_of_another_type():
    with pytest.raises(TypeError, match=r"backward_settings=.*UniformQuantizer.* is no brevact\.autograd"):
        backward_settings_from(StochBackward2bit.let(backward_settings=UniformQuantizer()))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Int8WeightPerTensorFloat, r"quantizes a weight or a bias.*put it into weight_quant= or bias_quant="),
        (Int16Bias, "Int16Bias, which quantizes a weight or a bias"),
        (TruncTo8bit, "TruncTo8bit, which quantizes no activations by itself"),
        (StochasticRounding, "fragment and lacks the solver: inherit from BackwardQuantSolver last"),
        (UniformQuantizer, "got <class UniformQuantizer>.*is no backward quantizer; accepted"),
        ("StochBackward2bit", r"of type str.*pass the class itself, without quotes: StochBackward2bit;"),
        ("brevact.StochBackwrd4bit", r"pass the class itself, without quotes: StochBackward4bit;"),
        (Int8ActPerTensorFloat, r"Int8ActPerTensorFloat, which quantizes the forward pass: .*StochBackward8bit"),
        ("2", "got '2' of type str, which is no backward quantizer; accepted"),
        (2, "got 2 of type int, which is no backward quantizer; accepted"),
        (True, "got True of type bool, which is no backward quantizer; accepted"),
        (float("nan"), "got nan of type float"),
        (None, r"of type NoneType.*restore_backward\(model\);"),
        (nn.ReLU(), r"got <ReLU module> of type ReLU.*quantize_backward\(model, StochBackward2bit\);"),
        (nn.BatchNorm2d, "got <class BatchNorm2d>"),
        (lambda x: x, "of type function"),
        (torch.rand(3), r"got <float32 Tensor of shape \(3,\)>"),
        ({"*": StochBackward2bit}, r"rules are a mapping, for brevact\.quantize_backward: "),
        ([("*", StochBackward2bit)], r"rules are a mapping, for brevact\.quantize_backward: "),
    ],
)
def test_backward_settings_from_refuses_what_is_no_backward_quantizer(source, message):
    with pytest.raises(TypeError, match=message) as caught:
        backward_settings_from(source)
    assert "accepted: a backward quantizer (StochBackward2bit" in str(caught.value)


def test_backward_settings_from_names_a_missing_setting():
    class NoWidth(StochasticRounding, UniformBuckets, SaveQuantized, BackwardQuantSolver):
        pass

    with pytest.raises(TypeError, match=r"NoWidth is incomplete: .*'bit_width'.*State the missing setting"):
        backward_settings_from(NoWidth)


@pytest.mark.parametrize("overrides", [{"forward_quant": Uint8ActPerTensorFloat}, {"forward_bit_width": 4}])
def test_backward_settings_from_refuses_a_forward_quantizer(overrides):
    with pytest.raises(ValueError, match=r"here only the backward pass is quantized: leave it out"):
        backward_settings_from(NearestBackward4bit, **overrides)
