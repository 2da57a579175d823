import pytest
import torch

import brevact
from recipes.models import VIT_SIZES, ViT
from recipes.models.transformer import Size
from recipes.models.vit import cut_into_patches

TINY = Size(depth=2, heads=2, width=16)


# DeiT's tiny and small sizes, as timm's vit_tiny_patch16_224 and vit_small_patch16_224.
@pytest.mark.parametrize(("size", "parameters"), [("tiny", 5_717_416), ("small", 22_050_664)])
def test_vit_has_the_parameters_of_the_paper(size, parameters):
    with torch.device("meta"):
        model = ViT(VIT_SIZES[size], classes=1000, image_size=224, patch_size=16)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(("pool", "tokens"), [("class", 17), ("mean", 16)])
def test_vit_classifies_a_token_of_its_own_or_the_mean(pool, tokens):
    model = ViT(TINY, classes=7, image_size=8, patch_size=2, channels_in=1, pool=pool)
    seen = []
    model.transformer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    outputs = model(torch.randn(3, 1, 8, 8))
    assert outputs.shape == (3, 7) and seen[0].shape == (3, tokens, 16)
    pooled = seen[0][:, 0] if pool == "class" else seen[0].mean(1)
    torch.testing.assert_close(outputs, model.classifier(pooled))


def test_cut_into_patches_makes_a_linear_layer_a_convolution():
    x, weight = torch.randn(2, 3, 8, 12), torch.randn(5, 3, 4, 4)
    expected = torch.nn.functional.conv2d(x, weight, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(cut_into_patches(x, 4) @ weight.flatten(1).T, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 3}, "patch_size=3 does not divide image_size=8"),
        ({"patch_size": 0}, "patch_size=0 does not divide"),
        ({"pool": "max"}, "pool='max' is not known; accepted: class, mean"),
    ],
)
def test_vit_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        ViT(TINY, classes=7, image_size=8, **({"patch_size": 2} | options))


def test_vit_trains_with_the_same_forward_when_it_stores_packed_activations():
    model = ViT(TINY, classes=5, image_size=32, patch_size=4)
    x = torch.randn(4, 3, 32, 32)
    plain = model(x)
    brevact.quantize_backward(model, brevact.StochBackward2bit)
    packed = model(x)
    assert torch.equal(plain, packed)
    packed.logsumexp(1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    report = brevact.memory_report(model, x)
    mlp = [row for row in report.rows if ".mlp." in row.layer]
    # 2 bits of 32, and 32 for each bucket of 512 elements, which are another 1/16 of 2 bits at most
    assert len(mlp) == 6 and all(row.saved_bytes < row.plain_bytes / 14 for row in mlp)
