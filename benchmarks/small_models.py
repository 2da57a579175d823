"""Architectures of transformers, timm and torchvision with random weights, small enough for a CPU.

pip install transformers; pip install --no-deps timm torchvision
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step import Model, Step, classified, own_loss

Batch = Callable[[], dict[str, Any]]


def tokens(vocabulary: int = 200, length: int = 64, **more: int) -> dict[str, Any]:
    """Token ids that are their own labels; `labels=32` for labels of another length."""
    ids = torch.randint(3, vocabulary, (8, length))
    return {"input_ids": ids, "labels": torch.randint(3, vocabulary, (8, more["labels"])) if more else ids}


def sequence(length: int) -> dict[str, Any]:
    ids = torch.randint(512, (1, length))
    return {"input_ids": ids, "labels": ids}


def images(batch: int, size: int, dense: bool = False) -> dict[str, Any]:
    """Images with one of ten classes for each, or for each pixel if they are dense."""
    labels = torch.randint(0, 10, (batch, size, size) if dense else (batch,))
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": labels}


def of_transformers(kind: str, config: str, batch: Batch, checkpoints: bool = False, **settings: Any) -> Model:
    """A model of transformers with its own loss."""

    def make() -> Step:
        import transformers

        model = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        if checkpoints:
            model.gradient_checkpointing_enable()
        return Step(model, batch(), own_loss)

    return Model(("transformers",), make)


_LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_BLOCKS = {**_LAYERS, "intermediate_size": 256}
_ENDS = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}

_LLAMA = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 512,
}


def _llama(length: int, **settings: int) -> Model:
    return of_transformers(
        "LlamaForCausalLM", "LlamaConfig", partial(sequence, length), **{**_LLAMA, **_ENDS, **settings}
    )


#: A Llama on sequences of some lengths.
LENGTHS: dict[str, Model] = {f"Llama 8x256, {length:,} tokens": _llama(length) for length in (256, 1024, 4096)}
_LARGER = {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 1408}
#: Sequences that a process of 2 GiB trains on a CPU: plain, and under the default.
LONGEST: dict[str, Model] = {f"Llama 16x512, {length:,} tokens": _llama(length, **_LARGER) for length in (1664, 13312)}
TRANSFORMERS: dict[str, Model] = {
    "BERT": of_transformers(
        "BertForMaskedLM", "BertConfig", tokens, vocab_size=200, max_position_embeddings=64, pad_token_id=0, **_BLOCKS
    ),
    "GPT-2": of_transformers(
        "GPT2LMHeadModel", "GPT2Config", tokens, vocab_size=200, n_embd=64, n_layer=2, n_head=4, n_positions=64, **_ENDS
    ),
    "Llama": of_transformers(
        *("LlamaForCausalLM", "LlamaConfig", tokens),
        **{**_LAYERS, **_ENDS, "vocab_size": 200, "intermediate_size": 192, "num_key_value_heads": 2},
        max_position_embeddings=64,
    ),
    "ViT": of_transformers(
        *("ViTForImageClassification", "ViTConfig", partial(images, 8, 32)),
        **{**_BLOCKS, "image_size": 32, "patch_size": 4, "num_labels": 10},
    ),
    "Swin": of_transformers(
        *("SwinForImageClassification", "SwinConfig", partial(images, 8, 32)),
        **{"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]},
        **{"window_size": 4, "num_labels": 10},
    ),
    "SegFormer": of_transformers(
        *("SegformerForSemanticSegmentation", "SegformerConfig", partial(images, 4, 32, True)),
        **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [32, 64]},
        **{"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
        **{"decoder_hidden_size": 64, "num_labels": 10},
    ),
    "Mamba": of_transformers(
        *("MambaForCausalLM", "MambaConfig", partial(tokens, length=32)),
        **{"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0, **_ENDS},
    ),
}


def _of_recipe(make: Callable[[], nn.Module]) -> Step:
    return Step(make(), (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))), classified)


def _efficientnetv2_nano() -> nn.Module:
    from recipes.models.efficientnetv2 import efficientnetv2

    return efficientnetv2("nano", image_size=32, classes=10)


def _resnet20() -> nn.Module:
    from recipes.models.resnet import ResNet20

    return ResNet20(classes=10)


CONVOLUTIONAL: dict[str, Model] = {
    "ResNet": of_transformers(
        *("ResNetForImageClassification", "ResNetConfig", partial(images, 4, 64)),
        **{"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [2, 2], "layer_type": "basic", "num_labels": 10},
    ),
    "ConvNeXt": of_transformers(
        *("ConvNextForImageClassification", "ConvNextConfig", partial(images, 8, 32)),
        **{"patch_size": 2, "hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2, "image_size": 32},
        num_labels=10,
    ),
    "MobileNetV2": of_transformers(
        *("MobileNetV2ForImageClassification", "MobileNetV2Config", partial(images, 6, 64)),
        **{"image_size": 64, "depth_multiplier": 0.5, "num_labels": 10},
    ),
    "RegNet": of_transformers(
        *("RegNetForImageClassification", "RegNetConfig", partial(images, 4, 64)),
        **{"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 2], "groups_width": 16, "layer_type": "y"},
        num_labels=10,
    ),
    "EfficientNetV2 nano": Model((), lambda: _of_recipe(_efficientnetv2_nano)),
    "ResNet-20": Model((), lambda: _of_recipe(_resnet20)),
}

_OF_TIMM = """
resnet18 resnet26d resnetv2_50 seresnet50 skresnet18 regnety_002 repvgg_a0 nfnet_f0 densenet121 dla34 efficientnet_b0
mobilenetv4_conv_small ghostnet_100 rexnet_100 convnext_atto convnextv2_atto inception_next_atto poolformerv2_s12
edgenext_xx_small repvit_m0_9 starnet_s1 pvt_v2_b0 twins_svt_small davit_tiny focalnet_tiny_srf
"""
#: With one window or one table of positions for a size of image.
_OF_ONE_SIZE = """
vit_tiny_patch16_224 deit3_small_patch16_224 eva02_tiny_patch14_224 mixer_s32_224 swin_tiny_patch4_window7_224
tnt_s_patch16_224 coat_lite_tiny xcit_nano_12_p16_224
"""
_OF_TORCHVISION = "squeezenet1_1 shufflenet_v2_x0_5 mnasnet0_5 mobilenet_v2 googlenet resnext50_32x4d"


def _image_model(name: str) -> Step:
    """A classifier of ten classes on 8 images of 64x64."""
    import timm
    import torchvision

    if name in _OF_TORCHVISION.split():
        model = torchvision.models.get_model(name, weights=None, num_classes=10)
    else:
        model = timm.create_model(name, num_classes=10, **({"img_size": 64} if name in _OF_ONE_SIZE.split() else {}))
    return Step(model, (torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))), _of_first_output)


def _of_first_output(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy, without auxiliary classifiers."""
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits if isinstance(logits, Tensor) else logits[0], batch[1])


IMAGE_MODELS: dict[str, Model] = {
    name: Model(("timm", "torchvision"), partial(_image_model, name))
    for name in f"{_OF_TIMM} {_OF_ONE_SIZE} {_OF_TORCHVISION}".split()
}
