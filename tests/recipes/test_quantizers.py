import brevitas.quant
import pytest
import torch

import brevact
from recipes.errors import RecipeError
from recipes.quantizers import backward_quantizer, find_quantizers
from recipes.settings import Settings


def test_backward_quantizer_applies_typed_overrides():
    injector = backward_quantizer("StochBackward2bit", ["bucket_size=64", "rounding=nearest"], "quantize_on_backward")
    quantizer = brevact.quantizer(injector)
    assert (quantizer.bit_width, quantizer.bucket_size, quantizer.rounding) == (2, 64, brevact.Rounding.NEAREST)
    assert injector.save_mode is brevact.SaveMode.QUANTIZE_ON_BACKWARD
    assert (
        brevact.quantizer(backward_quantizer("StochBackward2bit", ["bucket_size=None"], "save_quantized")).bucket_size
        is None
    )


def test_backward_quantizer_takes_a_dtype():
    injector = backward_quantizer("StochBackward2bit", ["scale_dtype=torch.float32"], "save_quantized")
    assert brevact.quantizer(injector).scale_dtype is torch.float32


def test_backward_quantizer_knows_every_leaf_of_the_package():
    leaves = [name for name in vars(brevact.quant) if name.endswith("bit")]
    assert len(leaves) >= 16
    for name in leaves:
        assert issubclass(backward_quantizer(name, [], "save_quantized"), getattr(brevact, name))


def test_backward_quantizer_knows_policies_by_name():
    assert backward_quantizer("TRANSFORMER", [], "save_quantized").rules.keys() == brevact.TRANSFORMER.rules.keys()
    policy = backward_quantizer("DEFAULT", ["bucket_size=64"], "quantize_on_backward")
    assert policy.rules.keys() == brevact.DEFAULT.rules.keys()
    for leaf in policy.rules.values():
        assert leaf is None or (leaf.bucket_size, leaf.save_mode) == (64, brevact.SaveMode.QUANTIZE_ON_BACKWARD)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("DEFALT", [], r"DEFALT is not a backward quantizer or policy of brevact; nearest: DEFAULT"),
        ("DEFAULT", ["buket_size=64"], r"backward quantizer DEFAULT buket_size=64: .*bucket_size"),
        (
            "StochBackward2bt",
            [],
            r"StochBackward2bt is not a backward quantizer.*nearest: StochBackward2bit",
        ),
        ("BackwardQuantSolver", [], r"is not a backward quantizer"),
        ("StochBackward2bit", ["buket_size=64"], r"buket_size.*bucket_size"),
        ("StochBackward2bit", ["bucket_size=-1"], r"bucket_size.*-1"),
        ("StochBackward2bit", ["bit_width=9"], r"bit_width.*9"),
        ("StochBackward2bit", ["bucket_size"], r"'bucket_size' is not of the form setting=value"),
        ("StochBackward2bit", ["__class__=3"], r"'__class__=3' is not of the form setting=value"),
        ("StochBackward2bit", ["let=3"], r"backward quantizer StochBackward2bit let=3: "),
        ("StochBackward2bit", ["scale_dtype=torch.nn"], r"scale_dtype"),
    ],
)
def test_backward_quantizer_refuses(name, overrides, message):
    with pytest.raises(RecipeError, match=message):
        backward_quantizer(name, overrides, "save_quantized")


def test_find_quantizers_takes_forward_ones_from_brevitas():
    settings = Settings(weight_quant="Int8WeightPerTensorFloat", input_quant="Int8ActPerTensorFloat")
    expected = (brevitas.quant.Int8WeightPerTensorFloat, brevitas.quant.Int8ActPerTensorFloat, None)
    state = torch.get_rng_state()
    assert find_quantizers(settings) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert find_quantizers(Settings()) == (None, None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_quant": "Int8ActPerTensorFloat"}, "--weight-quant Int8ActPerTensorFloat is not.*nearest: "),
        ({"weight_quant": "Int8WeightPerTensorFlot"}, "nearest: Int8WeightPerTensorFloat"),
        ({"input_quant": "Int8WeightPerTensorFloat"}, "--input-quant Int8WeightPerTensorFloat is not"),
        ({"input_quant": "MSESymmetricScale"}, "--input-quant MSESymmetricScale is not"),
        ({"act_override": ("bucket_size=64",)}, "add --act-quant NAME"),
        ({"weight_quant": "FpOCPWeightPerTensorFloat"}, "--weight-quant FpOCPWeightPerTensorFloat does not work in"),
        ({"weight_quant": "Int8AccumulatorAwareWeightQuant"}, "Int8AccumulatorAwareWeightQuant does not work in"),
        ({"input_quant": "Fp8e4m3ActPerChannelFloat2d"}, "--input-quant Fp8e4m3ActPerChannelFloat2d does not work in"),
        ({"input_quant": "Int8ActPerTensorFloatMinMaxInit"}, "MinMaxInit does not work in .*max_val"),
    ],
)
def test_find_quantizers_refuses(settings, message):
    with pytest.raises(RecipeError, match=message):
        find_quantizers(Settings(**settings))
