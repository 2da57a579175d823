"""Detection transformers, whose losses read non-contiguous parts of small tensors: lossless gradients are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import LosslessBackward

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.exhaustive

BACKBONE = {
    "embedding_size": 16,
    "hidden_sizes": [16, 24, 32, 48],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
SIZES = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "num_labels": 5}


def _detr() -> nn.Module:
    backbone = transformers.ResNetConfig(**BACKBONE, out_features=["stage4"])
    config = transformers.DetrConfig(
        **SIZES,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        num_queries=10,
    )
    return transformers.DetrForObjectDetection(config)


def _rt_detr() -> nn.Module:
    backbone = transformers.RTDetrResNetConfig(**BACKBONE, out_features=["stage2", "stage3", "stage4"])
    config = transformers.RTDetrConfig(
        **SIZES,
        backbone_config=backbone,
        encoder_in_channels=BACKBONE["hidden_sizes"][1:],
        encoder_hidden_dim=32,
        encoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_in_channels=[32, 32, 32],
        num_queries=20,
        num_denoising=10,
    )
    return transformers.RTDetrForObjectDetection(config)


@pytest.mark.parametrize("make", [_detr, _rt_detr])
def test_lossless_gradients_of_a_detection_transformer_are_those_of_torch(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    try:
        model = make().train()
    except (ImportError, RuntimeError) as error:  # of torchvision's operators, which transformers imports
        pytest.skip(f"transformers cannot import its detection models: {error}")
    images = torch.randn(2, 3, 128, 128)
    labels: list[dict[str, Any]] = [
        {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) * 0.4 + 0.3} for _ in range(2)
    ]
    state = {name: x.clone() for name, x in model.state_dict().items()}

    def gradients() -> dict[str, Tensor]:
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(1)
        model(pixel_values=images, labels=labels).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    brevact.quantize_backward(model, LosslessBackward)
    found = gradients()
    assert len(expected) > 50
    assert [name for name, grad in expected.items() if not torch.equal(found[name], grad)] == []
