import torch

import brevact
from recipes.models import ResNet, resnet50


def test_resnet50_has_the_parameters_of_the_paper():
    with torch.device("meta"):
        model = resnet50(classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032  # as torchvision's


def test_resnet50_has_the_maps_of_the_paper():
    with torch.device("meta"):
        model = resnet50(classes=7)
        maps = [model.stem(torch.empty(2, 3, 224, 224))]
        for block in model.blocks:
            maps.append(block(maps[-1]))
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 7)
    # table 1: the outputs of the stem's pooling and of the last block of each stage
    shapes = [tuple(maps[index].shape[1:]) for index in (0, 3, 7, 13, 16)]
    assert shapes == [(64, 56, 56), (256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7)]


def test_resnet50_keeps_the_maps_of_small_images():
    with torch.device("meta"):
        model = resnet50(classes=7, channels_in=1, image_size=32)
        features = model.blocks(model.stem(torch.empty(2, 1, 32, 32)))
    assert features.shape == (2, 2048, 4, 4)


def test_resnet_trains_with_the_same_forward_when_it_stores_packed_activations():
    model = ResNet((1, 1), classes=5, width=8)
    x = torch.randn(4, 3, 64, 64)
    plain = model(x)
    brevact.quantize_backward(model, brevact.StochBackward2bit)
    packed = model(x)
    assert torch.equal(plain, packed)
    packed.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert brevact.memory_report(model, x).ratio > 8
