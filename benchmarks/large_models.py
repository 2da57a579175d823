"""Models of the sizes that users train, with random weights; and small ones that have learned for a minute.

pip install transformers peft monai         # of GPT-2 and BERT, of LoRA, of MONAI's U-Net
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.step import Model, Step, classified, own_loss, supervised


class UNet3D(nn.Module):
    """Two halvings of a volume and back, each level of two convolutions and a skip connection.

    Source: Cicek et al., 3D U-Net, arXiv:1606.06650, with instance norms and leaky ReLUs as nnU-Net has them.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        sizes = [(1, width), (width, 2 * width), (2 * width, 4 * width), (6 * width, 2 * width), (3 * width, width)]
        self.blocks = nn.ModuleList(self._block(*each) for each in sizes)
        self.head = nn.Conv3d(width, classes, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            convolution = nn.Conv3d(channels, outputs, 3, padding=1, bias=False)
            layers += [convolution, nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)]
        return nn.Sequential(*layers)

    def forward(self, x_BCDHW: Tensor) -> Tensor:
        """Return (B, D, H, W, classes) logits of (B, 1, D, H, W) volumes."""
        passed: list[Tensor] = []
        x = self.blocks[0](x_BCDHW)
        for block in self.blocks[1:3]:
            passed.append(x)
            x = block(F.max_pool3d(x, 2))
        for block in self.blocks[3:]:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), passed.pop()], 1))
        return self.head(x).movedim(1, -1)


def images(name: str, batch: int, size: int) -> Step:
    """A classifier, "resnet50", "vit-s", "vit-b" or a size of EfficientNetV2, on square images."""
    from recipes.models import VIT_SIZES, FloatLayers, ViT, resnet50
    from recipes.models.efficientnetv2 import efficientnetv2
    from recipes.models.transformer import Size

    if name == "resnet50":
        model: nn.Module = resnet50(classes=10, image_size=size)
    elif name.startswith("vit"):
        width = VIT_SIZES["small"] if name == "vit-s" else Size(depth=12, heads=12, width=768)
        model = ViT(width, classes=10, image_size=size, patch_size=8 if size < 128 else 16)
    else:
        model = efficientnetv2(name, image_size=size, classes=10, layers=FloatLayers())
    return Step(model, (torch.randn(batch, 3, size, size), torch.randint(10, (batch,))), classified)


def volumes(width: int, batch: int, size: int) -> Step:
    """A 3-D U-Net on cubes."""
    x, y = torch.randn(batch, 1, *[size] * 3), torch.randint(3, (batch, *[size] * 3))
    return Step(UNet3D(width, 3), (x, y), classified)


def _monai(batch: int, size: int) -> Step:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(3, 1, 2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2)
    x, y = torch.randn(batch, 1, *[size] * 3), torch.randint(2, (batch, 1, *[size] * 3))
    return Step(model, (x, y), supervised(DiceCELoss(to_onehot_y=True, softmax=True)))


def gpt2(batch: int, length: int, lora: bool = False, **settings: Any) -> Step:
    """Hugging Face's GPT-2, of the small size unless settings say otherwise, or adapters of rank 8 beside it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(use_cache=False, n_positions=1024, **settings))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))
    tokens = torch.randint(0, model.config.vocab_size, (batch, length))
    return Step(model, {"input_ids": tokens, "labels": tokens}, own_loss)


def _llama(batch: int, length: int) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, use_cache=False)
    config.num_attention_heads = config.num_key_value_heads = 6
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    return Step(LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, own_loss)


def _mobilenet(batch: int, size: int) -> Step:
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2(num_classes=10, dropout=0.0)
    return Step(model, (torch.randn(batch, 3, size, size), torch.randint(10, (batch,))), classified)


def _bert(batch: int, length: int) -> Step:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, num_labels=4
    )
    batch_of = {"input_ids": torch.randint(0, config.vocab_size, (batch, length)), "labels": torch.randint(4, (batch,))}
    return Step(BertForSequenceClassification(config), batch_of, own_loss)


_SMALL = {"n_embd": 384, "n_layer": 6, "n_head": 6}
_WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
#: By name, with batch size and side, or tokens; `benchmarks.gpu` takes larger ones.
LARGE: dict[str, Model] = {
    "EfficientNetV2-S": Model((), partial(images, "s", 16, 32)),
    "ResNet-50": Model((), partial(images, "resnet50", 16, 64)),
    "ViT-S": Model((), partial(images, "vit-s", 16, 64)),
    "3-D U-Net": Model((), partial(volumes, 16, 2, 48)),
    "MobileNetV2 b16": Model(("torchvision",), partial(_mobilenet, 16, 64)),
    "MONAI U-Net": Model(("monai",), partial(_monai, 2, 96)),
    "GPT-2 small": Model(("transformers",), partial(gpt2, 4, 256)),
    "GPT-2 6x384": Model(("transformers",), partial(gpt2, 8, 256, **_SMALL)),
    "GPT-2 4x256": Model(("transformers",), partial(gpt2, 4, 256, vocab_size=4096, **_SMALL, **_WITHOUT_DROPOUT)),
    "Llama 6x384": Model(("transformers",), partial(_llama, 4, 256)),
    "GPT-2 with LoRA": Model(("transformers", "peft"), partial(gpt2, 4, 128, lora=True)),
    "BERT 6x384": Model(("transformers",), partial(_bert, 16, 128)),
}

#: Models of the rows of compiled steps.
COMPILED: dict[str, Model] = {
    name: LARGE[name]
    for name in ("Llama 6x384", "GPT-2 4x256", "ViT-S", "EfficientNetV2-S", "MobileNetV2 b16", "3-D U-Net")
}

_LEARNING = {"schedule": "onecycle", "dropout": 0.0, "label_smoothing": 0.0}


def _trained(recipe_name: str, make: Callable[..., nn.Module] | None = None, **changes: Any) -> Step:
    """A model of a recipe after some epochs, without dropout, on the batches that would follow."""
    import importlib

    from recipes.training import Objective, Trainer

    recipe, device = importlib.import_module(f"recipes.{recipe_name}").RECIPE, torch.device("cpu")
    settings = recipe.settings(**_LEARNING, **changes)
    data = recipe.load_data(settings)
    train, _ = recipe.make_batches(settings, data, device)
    model = make(data) if make is not None else recipe.build_model(settings, data, recipe.layers)
    trainer = Trainer(Objective(model, 0.0), settings, device, len(train))
    for epoch in range(1, settings.epochs + 1):
        trainer.train_epoch(train, epoch, lambda: None)
    later = list(train.epoch(settings.epochs + 1))
    return Step(model, later[0], classified, lambda number: later[number])


def _resnet20(data: Any) -> nn.Module:
    from recipes.models import ResNet20

    return ResNet20(classes=data.classes, channels_in=data.channels)


_IMAGES: dict[str, Callable[..., Step]] = {
    "EfficientNetV2 nano": partial(_trained, "efficientnetv2", batch_size=64, epochs=4),
    "ResNet-20": partial(_trained, "efficientnetv2", _resnet20, batch_size=64, epochs=4),
    "ViT nano": partial(_trained, "vit", batch_size=32, patch_size=4, epochs=4),
}
#: On scikit-learn's digits, GPT nano on text of Python's reference.
TRAINED: dict[str, Model] = {
    **{f"{name}, trained": Model(("sklearn",), make) for name, make in _IMAGES.items()},
    "GPT nano, trained": Model((), partial(_trained, "char_gpt", train_size=60_000, epochs=2, warmup_epochs=0.25)),
}
#: On 10,000 images of CIFAR-10, which lie in the folder `data`.
CIFAR10: dict[str, Model] = {
    f"{name}, CIFAR-10": Model(("torchvision",), partial(make, dataset="cifar10", train_size=10_000, test_size=1_000))
    for name, make in _IMAGES.items()
}
