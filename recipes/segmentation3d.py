"""Segmentation of volumes by MONAI's UNet or SegResNet, with the volumes of MONAI's own generator.

    python -m recipes.segmentation3d                        # the table: plain, checkpoint, DEFAULT, RECOMPUTE
    python -m recipes.segmentation3d --net segresnet --patch 64 --volume 96

Volumes with balls of several classes in noise are made on the spot (`monai.data.create_test_image_3d`). The network
trains on random patches (`RandCropByPosNegLabel`, flips) with `DiceCELoss`, and is tested on whole volumes by a sliding
window; the metric is the mean Dice of all classes but the background (`DiceMetric`).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from recipes import command_line
from recipes.recipe import (
    ABOVE_0,
    Metric,
    Recipe,
    RecipeError,
    Settings,
    Task,
    checkpoint_each,
    cosine,
    library,
    setting,
)
from recipes.results import save

NETS = ("unet", "segresnet")
#: Both networks halve their maps three times.
MULTIPLE = 8
_OF_8 = (lambda value: value >= 8 and value % 8 == 0, "use a multiple of 8, such as 16")
CLASSES = 3
_NOISE = 0.8
_TEST_SEED = 2**20  # of the volumes to test on, which are those of no run's training

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class VolumeSettings(Settings):
    epochs: int = setting(15, "passes over the training volumes", least=1)
    batch_size: int = setting(2, "patches in a step, each of another volume", least=1)
    lr: float = setting(4e-3, "largest learning rate of AdamW", check=ABOVE_0)
    net: str = setting("unet", "network of MONAI", choices=NETS)
    channels: int = setting(16, "channels at full resolution", check=_OF_8)
    patch: int = setting(48, "voxels along each edge of a patch")
    volume: int = setting(72, "voxels along each edge of a volume", least=32)
    train_size: int = setting(16, "volumes to train on", least=1)
    test_size: int = setting(4, "volumes to test on", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch < MULTIPLE or self.patch % MULTIPLE:
            below = max(MULTIPLE, self.patch // MULTIPLE * MULTIPLE)
            raise RecipeError(
                f"--patch {self.patch} is not possible: the network halves it three times; use a multiple of "
                f"{MULTIPLE}, such as {below} or {below + MULTIPLE}"
            )
        if self.patch > self.volume:
            raise RecipeError(
                f"--patch {self.patch} is not possible in volumes of {self.volume} voxels along each edge; use "
                f"{self.volume // MULTIPLE * MULTIPLE} at most, or --volume {self.patch}"
            )
        if self.train_size < self.batch_size:
            raise RecipeError(
                f"--batch-size {self.batch_size} is not possible with {self.train_size} volumes; use "
                f"{self.train_size} at most, or --train-size {self.batch_size}"
            )


class VolumeTask(Task):
    def __init__(self, settings: VolumeSettings, seed: int, device: torch.device) -> None:
        super().__init__(settings, seed, device)
        self.model = make_net(settings).to(device)
        self.criterion = library("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)
        self.steps_per_epoch = settings.train_size // settings.batch_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=1e-4)
        self.scheduler = cosine(self.optimizer, settings.epochs * self.steps_per_epoch)

    @cached_property
    def train_volumes(self) -> list[dict[str, Tensor]]:
        """Images and labels, each (1, volume, volume, volume)."""
        return make_volumes(self.settings, self.settings.train_size, self.seed)

    @cached_property
    def test_volumes(self) -> list[dict[str, Tensor]]:
        """As `train_volumes`; the same for all seeds."""
        return make_volumes(self.settings, self.settings.test_size, _TEST_SEED)

    def batches(self, epoch: int) -> Iterator[Batch]:
        transforms = library("monai.transforms")
        edge, keys = self.settings.patch, ["image", "label"]
        crop = transforms.RandCropByPosNegLabeld(keys, "label", (edge,) * 3, pos=1, neg=1, num_samples=1)
        patches = transforms.Compose([crop, *(transforms.RandFlipd(keys, 0.5, axis) for axis in range(3))])
        patches.set_random_state(seed=1000 * self.seed + epoch)
        order = np.random.RandomState(1000 * self.seed + epoch).permutation(self.settings.train_size)
        for step in range(self.steps_per_epoch):
            chosen = order[step * self.settings.batch_size :][: self.settings.batch_size]
            found = [patches(self.train_volumes[number])[0] for number in chosen]
            yield tuple(torch.stack([each[key].as_tensor() for each in found]).to(self.device) for key in keys)

    def loss(self, batch: Batch) -> Tensor:
        images, labels = batch
        return self.criterion(self.model(images), labels)

    @torch.no_grad()
    def predict(self, volume: dict[str, Tensor]) -> Tensor:
        """Classes (1, 1, volume, volume, volume) by a sliding window, whose windows overlap by a quarter."""
        infer = library("monai.inferers").sliding_window_inference
        image, edge = volume["image"][None].to(self.device), (self.settings.patch,) * 3
        self.model.eval()
        logits = infer(image, edge, self.settings.batch_size, self.model, overlap=0.25, mode="gaussian")
        self.model.train()
        return torch.as_tensor(logits).argmax(1, keepdim=True)

    def evaluate(self) -> float:
        metric = library("monai.metrics").DiceMetric(include_background=False, num_classes=1 + CLASSES)
        for volume in self.test_volumes:
            metric(self.predict(volume), volume["label"][None].to(self.device))
        return float(metric.aggregate())

    def use_checkpoints(self) -> None:
        blocks = library("monai.networks.blocks")
        kinds = (blocks.ResidualUnit, blocks.Convolution, library("monai.networks.blocks.segresnet_block").ResBlock)
        checkpoint_each(outermost(self.model, kinds))

    def show(self, path: Path) -> None:
        """Draws the middle of a test volume: image, labels, prediction."""
        volume = self.test_volumes[0]
        pictures = {**volume, "prediction": self.predict(volume)[0].cpu()}
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        for axes, (title, picture) in zip(figure.subplots(1, 3), pictures.items(), strict=True):
            colors = {"cmap": "gray"} if title == "image" else {"cmap": "viridis", "vmin": 0, "vmax": CLASSES}
            axes.imshow(picture[0, picture.shape[1] // 2].numpy(), interpolation="nearest", **colors)
            axes.set(title=title, xticks=[], yticks=[])
        save(figure, path)


def make_net(settings: VolumeSettings) -> nn.Module:
    nets, channels = library("monai.networks.nets"), settings.channels
    if settings.net == "unet":
        widths = [channels * 2**level for level in range(4)]
        return nets.UNet(3, 1, 1 + CLASSES, channels=widths, strides=(2, 2, 2), num_res_units=2)
    return nets.SegResNet(3, init_filters=channels, in_channels=1, out_channels=1 + CLASSES)


def make_volumes(settings: VolumeSettings, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Balls of three classes in noise."""
    make, edge = library("monai.data").create_test_image_3d, settings.volume
    random = np.random.RandomState(seed)
    volumes = []
    for _ in range(count):
        arrays = make(
            *(edge, edge, edge),
            num_objs=8,
            rad_max=edge // 5,
            rad_min=edge // 12,
            noise_max=_NOISE,
            num_seg_classes=CLASSES,
            channel_dim=0,
            random_state=random,
        )
        image, label = (torch.from_numpy(array.astype(np.float32)) for array in arrays)
        volumes.append({"image": image, "label": label})
    return volumes


def outermost(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Modules of some kinds that lie in no other of them."""
    found = []
    for module in model.children():
        found += [module] if isinstance(module, kinds) else outermost(module, kinds)
    return found


RECIPE = Recipe(
    module="recipes.segmentation3d",
    description=__doc__,
    settings=VolumeSettings,
    task=VolumeTask,
    metric=Metric("dice", "Dice"),
    libraries=("monai",),
)
main = partial(command_line.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
