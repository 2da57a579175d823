"""EfficientNetV2 with packed activations: the nano size learns digits as well in a thirtieth of the activation memory.

    python -m recipes.efficientnetv2 --compare DEFAULT

trains the nano size on scikit-learn's digits twice, at full precision and packed (two minutes on two CPU cores). The S
size with the settings of J. Li, master's thesis, Heidelberg University, 2025, section 6.3 (AdamW, learning rate 0.001,
50 epochs, batches of 128), on CIFAR-10, CIFAR-100 or Tiny ImageNet:

    python -m recipes.efficientnetv2 --dataset cifar10 --model s --act-quant StochBackward2bit \\
        --epochs 50 --batch-size 128 --lr 1e-3 --clip-grad-norm 1
    python -m recipes.efficientnetv2 --dataset tiny-imagenet --model s --act-quant StochBackward2bit4bitMix \\
        --schedule onecycle --warmup-epochs 15 --epochs 50 --batch-size 128 --lr 1e-3 --clip-grad-norm 1 --amp bf16

Forward quantizers of Brevitas beside a backward one with smaller buckets:

    python -m recipes.efficientnetv2 --weight-quant Int8WeightPerTensorFloat --input-quant Int8ActPerTensorFloat \\
        --compare StochBackward4bit:bucket_size=256

An interrupted command goes on with `--resume`, and ends in the weights of an uninterrupted one.
"""

import difflib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import brevitas.quant
import torch
from brevitas.inject import ExtendedInjector
from brevitas.proxy.parameter_quant import WeightQuantProxyFromInjectorBase
from brevitas.proxy.runtime_quant import ActQuantProxyFromInjectorBase
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import brevact
from recipes import command_line
from recipes.data import LOADERS, Batches
from recipes.models import SIZES, Layers, efficientnetv2
from recipes.recipe import ABOVE_0, SHARE, Metric, Recipe, RecipeError, Settings, Task, cosine, setting

AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class EfficientNetV2Settings(Settings):
    dataset: str = setting("digits", "images to train on", choices=tuple(LOADERS))
    data_dir: str = setting("data", "folder that holds the data set; digits needs none")
    train_size: int | None = setting(None, "train on this many images only", type=int, least=1)
    test_size: int | None = setting(None, "test on this many images only", type=int, least=1)
    model: str = setting("nano", "size of the EfficientNetV2", choices=tuple(SIZES))
    weight_quant: str | None = setting(None, "forward weight quantizer of brevitas.quant: Int8WeightPerTensorFloat")
    input_quant: str | None = setting(None, "forward input quantizer of brevitas.quant: Int8ActPerTensorFloat")
    batch_size: int = setting(32, "images in a training step, of which batch normalization needs two", least=2)
    lr: float = setting(3e-3, "largest learning rate of AdamW", check=ABOVE_0)
    weight_decay: float = setting(0.05, "decoupled weight decay; not for norms and biases", least=0)
    schedule: str = setting("cosine", "learning rate over the run", choices=("cosine", "onecycle", "constant"))
    warmup_epochs: float = setting(1.0, "epochs of linear warm-up (onecycle: of its rise)", least=0)
    label_smoothing: float = setting(0.05, "share of the target spread over all classes", check=SHARE)
    clip_grad_norm: float | None = setting(None, "largest norm of all gradients together", type=float, check=ABOVE_0)
    dropout: float = setting(0.2, "dropout before the classifier", check=SHARE)
    stochastic_depth: float = setting(0.0, "probability of dropping the last residual branch", check=SHARE)
    amp: str = setting("off", "autocast to this type", choices=tuple(AMP_DTYPES))
    captured: bool = setting(False, "replay the step as a CUDA graph, on a GPU")
    compile: bool = setting(False, "compile the model by torch.compile")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_epochs >= self.epochs and self.schedule != "constant":
            raise RecipeError(
                f"--warmup-epochs {self.warmup_epochs:g} leaves nothing of --epochs {self.epochs}; use a smaller value"
            )


class ImageTask(Task):
    """The classification of images by an EfficientNetV2, or by another model of that data."""

    def __init__(self, settings: Any, seed: int, device: torch.device, model: nn.Module | None = None) -> None:
        super().__init__(settings, seed, device)
        self.data = LOADERS[settings.dataset](Path(settings.data_dir), settings.train_size, settings.test_size)
        self.train_batches, self.test_batches = (
            Batches(part, self.data.normalization, settings.batch_size, device=device, seed=seed, **options)
            for part, options in (
                (self.data.train, {"train": True, "augment": self.data.augment}),
                (self.data.test, {}),
            )
        )
        self.steps_per_epoch = len(self.train_batches)
        self.dtype = AMP_DTYPES[settings.amp]
        if settings.amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise RecipeError(f"--amp bf16: {torch.cuda.get_device_name(device)} does not compute in it; use fp16")
        self.model = (self.build_model() if model is None else model).to(device)
        if settings.compile:
            self.model.compile()
        self.make_optimizer()

    def build_model(self) -> nn.Module:
        return self.network(self.layers())

    def layers(self) -> Layers:
        """Layers with the forward quantizers of the settings."""
        weight, inputs = self.settings.weight_quant, self.settings.input_quant
        found = Layers(
            weight and forward_quantizer(weight, WeightQuantProxyFromInjectorBase, "--weight-quant"),
            inputs and forward_quantizer(inputs, ActQuantProxyFromInjectorBase, "--input-quant"),
        )
        try_out(found, " ".join(filter(None, (weight, inputs))))
        return found

    def network(self, layers: Layers, ends: Layers | None = None) -> nn.Module:
        own, data = self.settings, self.data
        sizes = {"image_size": data.image_size, "classes": data.classes, "channels_in": data.channels}
        drops = {"dropout": own.dropout, "stochastic_depth": own.stochastic_depth}
        return efficientnetv2(own.model, **sizes, **drops, layers=layers, ends=ends)

    def make_optimizer(self) -> None:
        """Makes AdamW over the parameters that the model has now, the schedule, and the step that trains with them."""
        own, parameters = self.settings, [each for each in self.model.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": own.weight_decay},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
        ]
        kernels = {"fused": True, "capturable": True} if own.captured and self.device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(groups, lr=own.lr, **kernels)
        steps, warmup = own.epochs * self.steps_per_epoch, round(own.warmup_epochs * self.steps_per_epoch)
        if own.schedule != "onecycle":
            self.scheduler = cosine(self.optimizer, steps, warmup, decay=own.schedule == "cosine")
        elif steps < 4:
            raise RecipeError(f"--schedule onecycle needs at least 4 steps, this run has {steps}; use constant")
        else:  # OneCycleLR divides by the length of its rise, less one
            self.scheduler = OneCycleLR(self.optimizer, own.lr, total_steps=steps, pct_start=max(2, warmup) / steps)
        # PyTorch's initial scale of 2**16 overflows, and skips, the first steps of most networks.
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**12, enabled=own.amp == "fp16")
        self._step = brevact.captured(self._train) if own.captured else self._train

    def batches(self, epoch: int) -> Iterator[Batch]:
        return self.train_batches.epoch(epoch)

    def loss(self, batch: Batch) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            return F.cross_entropy(self.model(batch[0]), batch[1], label_smoothing=self.settings.label_smoothing)

    def step(self, batch: Batch) -> Tensor:
        return self._step(*batch)

    def _train(self, *batch: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with self.region():
            loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        if self.settings.clip_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @torch.no_grad()
    def scores(self) -> tuple[float, float]:
        """Mean cross-entropy of the test images, in nats, and the share of them that is predicted correctly."""
        loss, correct = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        self.model.eval()
        for images, labels in self.test_batches.epoch():
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                outputs = self.model(images)
            loss += F.cross_entropy(outputs, labels, reduction="sum")
            correct += (outputs.argmax(-1) == labels).sum()
        self.model.train()
        return loss.item() / len(self.data.test), correct.item() / len(self.data.test)

    def evaluate(self) -> float:
        return self.scores()[1]

    def use_checkpoints(self) -> None:
        raise RecipeError("checkpoint is not possible here: batch norms would average their statistics twice a step")

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, and the statistics that Brevitas' activation quantizers collect.

        Such a quantizer averages statistics over its first 300 batches and then learns its scale. A `state_dict` taken
        before that holds the average as if it were the learned scale: loading it would end the collection early.
        """
        statistics = {
            name: {"counter": int(module.counter), "buffer": module.buffer.clone(), "value": module.value.data.clone()}
            for name, module in collecting(self.model)
        }
        return {"scaler": self.scaler.state_dict(), "statistics": statistics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, module in collecting(self.model):
            saved = state["statistics"][name]
            module.counter = saved["counter"]
            module.buffer.copy_(saved["buffer"])
            module.value.data.copy_(saved["value"])
        self.make_optimizer()  # anew: loading made Brevitas replace activation quantizers, their parameters with them
        self.scaler.load_state_dict(state["scaler"])


def collecting(model: nn.Module) -> Iterable[tuple[str, Any]]:
    """Modules of Brevitas that collect statistics, by name."""
    for name, module in model.named_modules():
        tensors = (getattr(module, key, None) for key in ("buffer", "value"))
        if hasattr(module, "counter") and all(isinstance(each, Tensor) for each in tensors):
            yield name, module


def forward_quantizer(name: str, proxy: type, option: str) -> type:
    """The quantizer of `brevitas.quant` with this name, of those with that kind of proxy."""
    known = {}
    for key, value in vars(brevitas.quant).items():
        kind = value.proxy_class if isinstance(value, type(ExtendedInjector)) and "proxy_class" in value else None
        if isinstance(kind, type) and issubclass(kind, proxy) and not key.endswith(("Base", "Mixin", "Solver")):
            known[key] = value
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:3]
        raise RecipeError(f"{option} {name} is not a quantizer of brevitas.quant for it; nearest: {', '.join(near)}")
    return known[name]


def try_out(layers: Layers, names: str) -> None:
    """Runs one layer of each kind: many quantizers of Brevitas are for one kind only, or need settings of their own."""
    try:
        with torch.random.fork_rng(devices=[]):
            depthwise, linear = layers.conv(8, 8, 3, groups=8), layers.linear(8 * 16, 2)
            model = nn.Sequential(layers.conv(4, 8, 3), depthwise, nn.Flatten(), linear)
            model(torch.randn(2, 4, 4, 4)).sum().backward()
            model.eval()(torch.randn(2, 4, 4, 4))
    except Exception as error:  # whatever Brevitas raises, the quantizer does not serve here
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RecipeError(
            f"{names} cannot quantize the layers of this model as it is ({reason}); Int8WeightPerTensorFloat and "
            "Int8ActPerTensorFloat can"
        ) from error


RECIPE = Recipe(
    module="recipes.efficientnetv2",
    description=__doc__,
    settings=EfficientNetV2Settings,
    task=ImageTask,
    metric=Metric("accuracy", "accuracy", ".2%"),
    variants=("plain", "DEFAULT"),
    seeds=(0,),
)
main = partial(command_line.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
