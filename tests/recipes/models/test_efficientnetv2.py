import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat

import brevact
from recipes.models import SIZES, EfficientNetV2, FloatLayers, Layers, efficientnetv2
from recipes.models.efficientnetv2 import SqueezeExcitation, StochasticDepth


# torchvision's networks of the same sizes have 21,458,488 and 54,139,356 parameters with 1000 classes; 990 classes
# fewer take 990 * 1281 off.
@pytest.mark.parametrize(("size", "parameters"), [("s", 21_458_488 - 990 * 1281), ("m", 54_139_356 - 990 * 1281)])
def test_efficientnetv2_has_the_parameters_of_the_paper(size, parameters):
    with torch.device("meta"):
        model = efficientnetv2(size, image_size=32, classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(("image_size", "last_map"), [(32, 4), (64, 4), (224, 14)])
def test_efficientnetv2_keeps_the_last_map_larger_than_a_pixel(image_size, last_map):
    model = efficientnetv2("nano", image_size=image_size, classes=7)
    x = torch.randn(2, 3, image_size, image_size)
    assert model.blocks(model.stem(x)).shape == (2, SIZES["nano"][0][-1].channels, last_map, last_map)
    assert model(x).shape == (2, 7)


def test_efficientnetv2_names_the_sizes_when_one_is_unknown():
    with pytest.raises(ValueError, match=r"'xl' is not a size.*nano, s, m"):
        efficientnetv2("xl", image_size=32, classes=10)


def test_efficientnetv2_spreads_stochastic_depth_from_zero():
    model = efficientnetv2("nano", image_size=32, classes=10, stochastic_depth=0.3)
    drops = [module.probability for module in model.modules() if isinstance(module, StochasticDepth)]
    assert drops == pytest.approx([0.3 * index / len(drops) for index in range(len(drops))])


def test_layers_hand_forward_quantizers_to_every_convolution_and_linear_layer():
    model = efficientnetv2(
        "nano", image_size=32, classes=10, layers=Layers(Int8WeightPerTensorFloat, Int8ActPerTensorFloat)
    )
    weighted = [module for module in model.modules() if isinstance(module, (qnn.QuantConv2d, qnn.QuantLinear))]
    assert len(weighted) > 10
    assert all(module.weight_quant.is_quant_enabled and module.input_quant.is_quant_enabled for module in weighted)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(module.weight.grad.abs().sum() > 0 for module in weighted)


def test_layers_without_quantizers_are_full_precision():
    model = efficientnetv2("nano", image_size=32, classes=10)
    conv = model.stem[0]
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(conv(x), torch.nn.functional.conv2d(x, conv.weight, stride=1, padding=1))


def test_float_layers_give_the_same_model():
    models = []
    for layers in (Layers(), FloatLayers()):
        torch.manual_seed(0)
        models.append(efficientnetv2("nano", image_size=32, classes=10, dropout=0.0, layers=layers))
    assert not any(isinstance(module, (qnn.QuantConv2d, qnn.QuantLinear)) for module in models[1].modules())
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(models[0](x), models[1](x))


def test_quantize_backward_keeps_state_dict_and_forward_of_the_model():
    models: list[EfficientNetV2] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(efficientnetv2("nano", image_size=32, classes=10, dropout=0.0))
    plain, packed = models
    brevact.quantize_backward(packed, brevact.StochBackward2bit)
    assert plain.state_dict().keys() == packed.state_dict().keys()
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(plain(x), packed(x))


def test_quantize_backward_covers_the_multiplication_between_layers():
    layers = Layers()
    model = torch.nn.Sequential(layers.act(), SqueezeExcitation(layers, channels=32, squeezed=8))
    brevact.quantize_backward(model, brevact.StochBackward2bit)
    x = torch.randn(8, 32, 16, 16, requires_grad=True)
    report = brevact.memory_report(model, x)
    # In full: the input of SiLU and its output, for the product; here 2 bits and 48 a bucket of 512 for each of them,
    # and some small tensors.
    assert report.plain_bytes > 2 * x.nbytes
    assert report.saved_bytes < 2 * x.nbytes / 8


def test_stochastic_depth_keeps_the_mean():
    draws, probability = 20_000, 0.4
    module = StochasticDepth(probability)
    kept = module(torch.ones(draws, 1, 1, 1))
    standard_error = (probability / (1 - probability) / draws) ** 0.5  # variance of Bernoulli(1 - p) / (1 - p)
    assert abs(kept.mean().item() - 1.0) < 5 * standard_error
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - probability)])
    assert torch.equal(module.eval()(torch.ones(3, 1, 1, 1)), torch.ones(3, 1, 1, 1))
