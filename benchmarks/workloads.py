"""Models that benchmarks train in processes of their own, each with the loss of one fixed batch.

    pip install transformers peft monai         # of GPT-2 and BERT, of LoRA, of the 3-D U-Net

A builder imports what it needs when it is called: PyTorch, too, whose import is part of what is measured.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

#: Runs a forward pass and returns the loss.
Loss = Callable[[], Any]

MODELS = {
    "efficientnetv2-s": (64, 1),
    "gpt2": (4, 12),
    "mlp": (1024, 12),
    "gpt2-lora": (4, 12),
    "gpt2-lora-bf16": (4, 12),
    "bert": (16, 6),
    "mobilenet-w4a4": (64, 1),
    "resnet50": (8, 1),
    "unet3d": (2, 1),
    "unet3d-6": (6, 1),
}
"""Batch size and depth: layers of a transformer or an MLP, or blocks of EfficientNetV2-S in units of the paper's."""


def _efficientnet(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Loss]:
    """EfficientNetV2-S on images of 32x32."""
    import dataclasses

    from torch import nn

    _without_brevact(nn)
    from recipes.models import FloatLayers
    from recipes.models.efficientnetv2 import SIZES, EfficientNetV2

    stages = tuple(dataclasses.replace(stage, blocks=stage.blocks * depth) for stage in SIZES["s"].stages)
    size = dataclasses.replace(SIZES["s"], stages=stages)
    model = EfficientNetV2(size, classes=10, stem_stride=1, layers=FloatLayers())
    if checkpointed:
        checkpoint_each(model.get_submodule("blocks").children())
    return model, _classification(model, batch_size, 32)


def _without_brevact(nn: Any) -> None:
    """Let the recipes' models be imported without the package, which plain training does not need."""
    if "brevact" not in sys.modules:
        sys.modules["brevact"] = types.ModuleType("brevact")
        sys.modules["brevact.nn"] = sys.modules["brevact"].nn = nn


def _classification(model: Any, batch_size: int, side: int, classes: int = 10) -> Loss:
    """The cross-entropy of a model on images with as many channels and rows of pixels as columns."""
    import torch
    from torch import nn

    images, labels = torch.randn(batch_size, 3, side, side), torch.randint(0, classes, (batch_size,))
    return lambda: nn.functional.cross_entropy(model(images), labels)


def _resnet50(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Loss]:
    """ResNet-50 on images of 224x224."""
    from torch import nn

    _without_brevact(nn)
    from recipes.models import resnet50

    model = resnet50(classes=1000)
    if checkpointed:
        checkpoint_each(model.get_submodule("blocks").children())
    return model, _classification(model, batch_size, 224, 1000)


def _mobilenet(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Loss]:
    """The MobileNet of `benchmarks.qat`, weights and activations of 4 bits by Brevitas, on images of 32x32.

    Its scales are collected before: a checkpoint would run the last step that collects, and then another one.
    """
    import torch
    from torch import nn

    from benchmarks.qat_nets import COLLECTED, Layers, mobile_net

    model = mobile_net(Layers(4, collecting=False)).train()
    with torch.no_grad():
        for _ in range(COLLECTED):
            model(torch.randn(2, 3, 32, 32))
    if checkpointed:
        first, rest = 4, 6  # a quantizer and a convolution; of each block two convolutions, with norms and functions
        layers = list(model)
        count = (len(layers) - first) // rest
        blocks = [nn.Sequential(*layers[first + rest * i : first + rest * (i + 1)]) for i in range(count)]
        checkpoint_each(blocks)
        model = nn.Sequential(*layers[:first], *blocks, *layers[first + rest * count :])
    return model, _classification(model, batch_size, 32)


def gpt2(depth: int) -> Any:
    """Hugging Face's GPT-2 of the small size, in training mode.

    Args:
        depth: layers; the small size has 12.
    """
    from recipes.torchvision_ops import declare_missing_ops

    declare_missing_ops()
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=depth)).train()


def _gpt2(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Loss]:
    """GPT-2 on sequences of 256 tokens, all weights."""
    model = gpt2(depth)
    return model, _language(model, batch_size, 256, checkpointed)


def _language(model: Any, batch_size: int, length: int, checkpointed: bool) -> Loss:
    import torch

    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, model.config.vocab_size, (batch_size, length))
    return lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _gpt2_lora(batch_size: int, depth: int, checkpointed: bool, *, bf16: bool = False) -> tuple[Any, Loss]:
    """GPT-2 with adapters of rank 8 beside the projection of attention, on sequences of 128 tokens.

    In bfloat16 it runs under autocast, as `transformers.Trainer(bf16=True)` lets it run.
    """
    import torch

    model = gpt2(depth)
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)).train()
    loss = _language(model, batch_size, 128, checkpointed)

    def in_autocast() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    return model, in_autocast if bf16 else loss


def _bert(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Loss]:
    """A BERT of 384 features that classifies sequences of 128 tokens, all weights."""
    import torch

    from recipes.torchvision_ops import declare_missing_ops

    declare_missing_ops()
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384, num_hidden_layers=depth, num_attention_heads=12, intermediate_size=1536, num_labels=4
    )
    model = BertForSequenceClassification(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, config.vocab_size, (batch_size, 128))
    labels = torch.randint(0, 4, (batch_size,))
    return model, lambda: model(input_ids=tokens, labels=labels).loss


def _unet3d(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Loss]:
    """MONAI's residual U-Net on volumes of 96x96x96 voxels, with the Dice and cross-entropy loss."""
    import torch
    from monai.losses import DiceCELoss
    from monai.networks.blocks import ResidualUnit
    from monai.networks.nets import UNet

    model = UNet(3, 1, 2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2).train()
    if checkpointed:
        checkpoint_each([module for module in model.modules() if isinstance(module, ResidualUnit)])
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    volumes = torch.randn(batch_size, 1, 96, 96, 96)
    labels = torch.randint(0, 2, (batch_size, 1, 96, 96, 96))
    return model, lambda: criterion(model(volumes), labels)


def _mlp(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Loss]:
    import torch
    from torch import nn

    blocks = [
        nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(depth)
    ]
    if checkpointed:
        checkpoint_each(blocks)
    model, rows = nn.Sequential(*blocks), torch.randn(batch_size, 512, requires_grad=checkpointed)
    return model, lambda: model(rows).square().mean()


def checkpoint_each(blocks: Iterable[Any]) -> None:
    """Let each block keep its input alone and recompute the rest.

    Args:
        blocks: modules; changed in place.
    """
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


WORKLOADS: dict[str, Callable[[int, int, bool], tuple[Any, Loss]]] = {
    "efficientnetv2-s": _efficientnet,
    "gpt2": _gpt2,
    "mlp": _mlp,
    "gpt2-lora": _gpt2_lora,
    "gpt2-lora-bf16": functools.partial(_gpt2_lora, bf16=True),
    "bert": _bert,
    "mobilenet-w4a4": _mobilenet,
    "resnet50": _resnet50,
    "unet3d": _unet3d,
    "unet3d-6": _unet3d,
}
"""Builders by name: batch size, depth, and whether each block is a checkpoint, to model and loss."""
