"""Architectures of real models with random weights, small enough for a CPU, large enough that their tensors are packed.

Each builder returns a model in training mode and a function that runs it: (model) -> loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

from recipes.models.efficientnetv2 import efficientnetv2
from recipes.models.resnet import ResNet20
from recipes.torchvision_ops import declare_missing_ops

declare_missing_ops()  # transformers imports torchvision if it is there


class Subject(NamedTuple):
    """A model and a batch for it.

    Args:
        model: the model, in training mode.
        batch: keyword arguments of its forward; what it returns is a loss, or has one.
    """

    model: nn.Module
    batch: dict[str, Tensor]


class WithLoss(nn.Module):
    """A classifier with its cross-entropy.

    Args:
        classifier: maps images (B, 3, H, W) to logits (B, classes).
    """

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.classifier(pixel_values), labels)


def loss_of(subject: Subject) -> Tensor:
    """Loss of the model on the batch."""
    output = subject.model(**subject.batch)
    return output if isinstance(output, Tensor) else output.loss


def _tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def _images(batch: int, size: int, classes: int = 10) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def bert() -> Subject:
    config = transformers.BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    ids = _tokens(200, 8, 64)
    return Subject(transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids})


def gpt2() -> Subject:
    config = transformers.GPT2Config(
        vocab_size=200, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    ids = _tokens(200, 8, 64)
    return Subject(transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


def llama() -> Subject:
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = _tokens(200, 8, 64)
    return Subject(transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


class _T5Classifier(nn.Module):
    """Encoder of T5 with a linear head over its tokens."""

    def __init__(self, config: transformers.T5Config) -> None:
        super().__init__()
        self.encoder = transformers.T5EncoderModel(config)
        self.head = nn.Linear(config.d_model, config.vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.head(self.encoder(input_ids=input_ids).last_hidden_state)
        return nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def t5_encoder() -> Subject:
    config = transformers.T5Config(
        vocab_size=200, d_model=64, d_kv=16, d_ff=192, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return Subject(_T5Classifier(config), {"input_ids": _tokens(200, 8, 64)})


def vit() -> Subject:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, image_size=32, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    return Subject(transformers.ViTForImageClassification(config), _images(8, 32))


def swin() -> Subject:
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10
    )
    return Subject(transformers.SwinForImageClassification(config), _images(8, 32))


def resnet() -> Subject:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="basic", num_labels=10
    )
    return Subject(transformers.ResNetForImageClassification(config), _images(4, 64))


def convnext() -> Subject:
    config = transformers.ConvNextConfig(
        patch_size=2, hidden_sizes=[32, 64], depths=[2, 2], num_stages=2, image_size=32, num_labels=10
    )
    return Subject(transformers.ConvNextForImageClassification(config), _images(8, 32))


def mobilenet_v2() -> Subject:
    config = transformers.MobileNetV2Config(image_size=64, depth_multiplier=0.5, num_labels=10)
    return Subject(transformers.MobileNetV2ForImageClassification(config), _images(6, 64))


def regnet() -> Subject:
    config = transformers.RegNetConfig(
        embedding_size=32, hidden_sizes=[32, 64], depths=[1, 2], groups_width=16, layer_type="y", num_labels=10
    )
    return Subject(transformers.RegNetForImageClassification(config), _images(4, 64))


class _WhisperClassifier(nn.Module):
    """Encoder of Whisper with the mean over time and a linear head."""

    def __init__(self, config: transformers.WhisperConfig) -> None:
        super().__init__()
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        self.encoder = WhisperEncoder(config)
        self.head = nn.Linear(config.d_model, 10)

    def forward(self, input_features: Tensor, labels: Tensor) -> Tensor:
        states = self.encoder(input_features).last_hidden_state
        return nn.functional.cross_entropy(self.head(states.mean(1)), labels)


def whisper_encoder() -> Subject:
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=256, num_mel_bins=40,
        max_source_positions=64,
    )  # fmt: skip
    features = torch.randn(8, 40, 128)
    return Subject(_WhisperClassifier(config), {"input_features": features, "labels": torch.randint(0, 10, (8,))})


def segformer() -> Subject:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[32, 64], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=64, num_labels=10,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4, 32, 32))}
    return Subject(transformers.SegformerForSemanticSegmentation(config), batch)


def mamba() -> Subject:
    config = transformers.MambaConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, state_size=8, use_cache=False, pad_token_id=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = _tokens(200, 8, 32)
    return Subject(transformers.MambaForCausalLM(config), {"input_ids": ids, "labels": ids})


def efficientnetv2_nano() -> Subject:
    return Subject(WithLoss(efficientnetv2("nano", image_size=32, classes=10)), _images(8, 32))


def resnet20() -> Subject:
    return Subject(WithLoss(ResNet20(classes=10)), _images(8, 32))


TRANSFORMERS: dict[str, Callable[[], Subject]] = {
    "BERT": bert,
    "GPT-2": gpt2,
    "Llama": llama,
    "T5 encoder": t5_encoder,
    "ViT": vit,
    "Swin": swin,
    "Whisper encoder": whisper_encoder,
    "SegFormer": segformer,
    "Mamba": mamba,
}
CONVOLUTIONAL: dict[str, Callable[[], Subject]] = {
    "ResNet": resnet,
    "ConvNeXt": convnext,
    "MobileNetV2": mobilenet_v2,
    "RegNet": regnet,
    "EfficientNetV2 nano": efficientnetv2_nano,
    "ResNet-20": resnet20,
}
MODELS = TRANSFORMERS | CONVOLUTIONAL


def build(name: str, seed: int = 0, builders: dict[str, Callable[[], Subject]] = MODELS) -> Subject:
    """Build a model and a batch from a seed.

    Args:
        name: key of the builders.
        seed: of weights and batch.
        builders: of models, by name.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        subject = builders[name]()
    subject.model.train()
    return subject
