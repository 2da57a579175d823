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
    """A classifier of timm, or a size of the recipe's EfficientNetV2, on square images."""
    if name in ("s", "m"):
        from recipes.models import FloatLayers, efficientnetv2

        model: nn.Module = efficientnetv2(name, image_size=size, classes=10, layers=FloatLayers())
    else:
        import timm

        patches = {"img_size": size, "patch_size": 8 if size < 128 else 16} if name.startswith("vit") else {}
        model = timm.create_model(name, num_classes=10, **patches)
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
    "ResNet-50": Model(("timm",), partial(images, "resnet50", 16, 64)),
    "ViT-S": Model(("timm",), partial(images, "vit_small_patch16_224", 16, 64)),
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


def _trained(task: Any, loss: Any) -> Step:
    """The model of a recipe's task after its epochs, on the batches that would follow."""
    from recipes.recipe import Task

    for epoch in range(1, task.settings.epochs + 1):
        Task.train_epoch(task, epoch, lambda: None)  # also where a library has a loop of its own
    later = list(task.batches(task.settings.epochs + 1))
    return Step(task.model, later[0], loss, lambda number: later[number])


def _of_images(make: Callable[[], nn.Module] | None = None, **changes: Any) -> Step:
    """A classifier that has learned images, by default the EfficientNetV2 nano, without dropout."""
    from recipes.efficientnetv2 import EfficientNetV2Settings, ImageTask

    data = {"dataset": "cifar10", "train_size": 10_000, "test_size": 1_000}
    options = {"schedule": "onecycle", "dropout": 0.0, "label_smoothing": 0.0, "epochs": 4, **changes}
    settings, device = EfficientNetV2Settings(**data, **options), torch.device("cpu")
    model = make and make()
    return _trained(ImageTask(settings, 0, device, model), classified)


def _resnet20() -> nn.Module:
    from recipes.models import ResNet20

    return ResNet20(classes=10, channels_in=3)


def _vit_nano() -> nn.Module:
    import timm

    size = {"embed_dim": 96, "depth": 6, "num_heads": 3, "img_size": 32, "patch_size": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **size)


def _gpt_nano() -> Step:
    """A GPT-2 of four layers, by bytes, after two epochs."""
    from recipes.finetune import FineTuneSettings, FineTuning

    size = {"architecture": "gpt2", "vocabulary": 257, "context": 64, "batch_size": 16, "sequences": 928}
    settings = FineTuneSettings(**size, epochs=2, lr=1e-3)
    return _trained(FineTuning(settings, 0, torch.device("cpu")), own_loss)


_IMAGES: dict[str, tuple[tuple[str, ...], Callable[..., Step]]] = {
    "EfficientNetV2 nano": ((), partial(_of_images, batch_size=64)),
    "ResNet-20": ((), partial(_of_images, _resnet20, batch_size=64)),
    "ViT nano": (("timm",), partial(_of_images, _vit_nano, batch_size=32, lr=1e-3, clip_grad_norm=1.0)),
}
#: On 10,000 images of CIFAR-10, which lie in the folder `data`.
CIFAR10: dict[str, Model] = {
    f"{name}, CIFAR-10": Model(("torchvision", *needs), make) for name, (needs, make) in _IMAGES.items()
}
#: And on text of Python's reference.
TRAINED: dict[str, Model] = {**CIFAR10, "GPT nano, trained": Model(("transformers",), _gpt_nano)}
