"""Diffusion models and autoencoders of diffusers on digits and CIFAR-10: plain, checkpoint, packed.

    python -m recipes.diffusion                                                    # a UNet2DModel on digits
    python -m recipes.diffusion --model dit --dataset cifar10 --data-dir DIR       # a DiT, which is told the classes
    python -m recipes.diffusion --model autoencoder                                # AutoencoderKL, by encode and decode

A UNet or a DiT learns to predict the noise in an image (DDPM, 1,000 times, cosine schedule). Its metric is the mean
squared error of the noise in held-out images, with averaged weights (EMA); its picture has samples of 50 steps of DDIM.
The autoencoder's metric is the mean squared error of reconstructions, of pixels from -1 to 1; its picture has held-out
images, and below them their reconstructions.

The digits are 1,797 images that come with scikit-learn.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from recipes import command_line
from recipes.data import LOADERS, Batches, ImageDataset
from recipes.recipe import ABOVE_0, SHARE, Metric, Recipe, Settings, Task, library, setting
from recipes.results import save

#: Channels of the images of each data set; both have 10 classes and 32 pixels along an edge.
CHANNELS = {"digits": 1, "cifar10": 3}
CLASSES, TIMES, SAMPLING_STEPS, SHOWN = 10, 1000, 50, 32
CODE_CHANNELS = 4
_SCHEDULE = "squaredcos_cap_v2"
_TEST_SEED = 2**60
_KL_WEIGHT = 1e-4
_OF_8 = (lambda value: value >= 8 and value % 8 == 0, "use a multiple of 8")


@dataclass(frozen=True)
class DiffusionSettings(Settings):
    epochs: int = setting(8, "passes over the training images", least=1)
    batch_size: int = setting(32, "images in a training step", least=1)
    lr: float = setting(1e-3, "learning rate of AdamW", check=ABOVE_0)
    model: str = setting("unet", "what is trained", choices=("unet", "dit", "autoencoder"))
    dataset: str = setting("digits", "images", choices=tuple(CHANNELS))
    data_dir: str = setting("data", "folder of CIFAR-10")
    train_size: int | None = setting(None, "train on this many images only", type=int)
    test_size: int | None = setting(None, "test on this many images only", type=int)
    image_size: int = setting(16, "pixels along an edge, means of those of the data set", choices=(8, 16, 32))
    width: int = setting(32, "channels of the first level, of a head of the DiT", check=_OF_8)
    ema: float = setting(0.995, "decay of averaged weights", check=SHARE)
    bf16: bool = setting(False, "autocast to bfloat16")


class Diffusion(Task):
    def __init__(self, settings: DiffusionSettings, seed: int, device: torch.device) -> None:
        super().__init__(settings, seed, device)
        self.is_autoencoder = settings.model == "autoencoder"
        self.model = {"unet": _unet, "dit": _dit, "autoencoder": _autoencoder}[settings.model](settings)
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=0.01)
        training = library("diffusers.training_utils")
        self.average = training.EMAModel(self.model.parameters(), decay=settings.ema, use_ema_warmup=True, power=0.75)
        self.noises = library("diffusers").DDPMScheduler(TIMES, beta_schedule=_SCHEDULE)
        self._data: ImageDataset | None = None

    @property
    def data(self) -> ImageDataset:
        if self._data is None:
            own = self.settings
            self._data = LOADERS[own.dataset](Path(own.data_dir), own.train_size, own.test_size)
        return self._data

    @property
    def steps_per_epoch(self) -> int:
        return len(self._images(train=True))

    def batches(self, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Images, and the noise and the times that are drawn for them."""
        return self._with_noise(self._images(train=True).epoch(epoch), self.seed * 2**20 + epoch)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean squared error of the noise; of the autoencoder that of the images, and the divergence of its codes."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16):
            if not self.is_autoencoder:
                return F.mse_loss(self._predicted(batch).float(), batch["noise"])
            codes = self.model.encode(batch["images"]).latent_dist
            decoded = self.model.decode(codes.mean + codes.std * batch["noise"]).sample
            return F.mse_loss(decoded.float(), batch["images"]) + _KL_WEIGHT * codes.kl().mean()

    def after_step(self) -> None:
        self.average.step(self.model.parameters())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean squared error on the test images, with averaged weights: of the noise, or of reconstructions."""
        total, count = 0.0, 0
        with self._averaged():
            for batch in self._with_noise(self._images(train=False).epoch(), _TEST_SEED):
                if self.is_autoencoder:
                    error = F.mse_loss(self._reconstructed(batch["images"]), batch["images"])
                else:
                    error = F.mse_loss(self._predicted(batch), batch["noise"])
                total += float(error) * len(batch["images"])
                count += len(batch["images"])
        return total / count

    def use_checkpoints(self) -> None:
        """As diffusers' training scripts do."""
        self.model.enable_gradient_checkpointing()

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)
        self.average.to(self.device)

    @torch.no_grad()
    def show(self, path: Path) -> None:
        """Draws samples, or images and their reconstructions."""
        with self._averaged():
            if self.is_autoencoder:
                images = next(self._with_noise(self._images(train=False).epoch(), 0))["images"][: SHOWN // 2]
                images = torch.cat([images, self._reconstructed(images)])
            else:
                images = self.samples(SHOWN)
        draw_grid(images.cpu(), path, title=f"{self.settings.model}, {path.stem.partition('-')[2]}")

    def samples(self, count: int) -> Tensor:
        """Draws images (N x C x H x W, from -1 to 1) from fixed noise, one class after another."""
        own, scheduler = self.settings, library("diffusers").DDIMScheduler(TIMES, beta_schedule=_SCHEDULE)
        scheduler.set_timesteps(SAMPLING_STEPS)
        shape = count, CHANNELS[own.dataset], own.image_size, own.image_size
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        labels = torch.arange(count, device=self.device) % CLASSES
        for time in scheduler.timesteps:
            batch = {"noisy": images, "times": time.to(self.device).expand(count), "labels": labels}
            images = scheduler.step(self._predicted(batch), time, images).prev_sample
        return images

    def _predicted(self, batch: dict[str, Tensor]) -> Tensor:
        classes = {"class_labels": batch["labels"]} if self.settings.model == "dit" else {}
        return self.model(batch["noisy"], timestep=batch["times"], **classes).sample

    def _reconstructed(self, images: Tensor) -> Tensor:
        return self.model.decode(self.model.encode(images).latent_dist.mean).sample

    def _images(self, *, train: bool) -> Batches:
        data = self.data
        normalization = 2 * ((0.5,) * data.channels,)  # from -1 to 1
        augment = train and data.augment  # by flips
        split, options = data.train if train else data.test, {"augment": augment, "padding": 0, "seed": self.seed}
        return Batches(split, normalization, self.settings.batch_size, device=self.device, train=train, **options)

    def _with_noise(self, batches: Iterable[tuple[Tensor, Tensor]], seed: int) -> Iterator[dict[str, Tensor]]:
        """Inputs of a step from images: noise of codes, or noisy images at times."""
        generator = torch.Generator().manual_seed(seed)
        for images, labels in batches:
            images = F.avg_pool2d(images, images.shape[-1] // self.settings.image_size)
            count, _, *edges = images.shape
            shape = (count, CODE_CHANNELS, *(edge // 4 for edge in edges)) if self.is_autoencoder else images.shape
            noise = torch.randn(shape, generator=generator).to(images)
            batch = {"images": images, "noise": noise}
            if not self.is_autoencoder:
                times = torch.randint(TIMES, (count,), generator=generator).to(self.device)
                batch |= {"noisy": self.noises.add_noise(images, noise, times), "times": times, "labels": labels}
            yield batch

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The averaged weights in the model, in eval mode."""
        self.average.store(self.model.parameters())
        self.average.copy_to(self.model.parameters())
        self.model.eval()
        try:
            yield
        finally:
            self.average.restore(self.model.parameters())
            self.model.train()


def draw_grid(images: Tensor, path: Path, title: str) -> None:
    """Draws images (N x C x H x W, from -1 to 1), eight in a row, to a PNG file."""
    columns = 8
    figure = Figure(figsize=(columns * 0.75, len(images) / columns * 0.75 + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, image in zip(figure.subplots(len(images) // columns, columns).flat, images, strict=True):
        axes.imshow(image.add(1).div(2).clamp(0, 1).permute(1, 2, 0).numpy(), cmap="gray_r", vmin=0, vmax=1)
        axes.axis("off")
    save(figure, path)


def _unet(settings: DiffusionSettings) -> Any:
    width = settings.width
    return library("diffusers").UNet2DModel(
        sample_size=settings.image_size,
        **dict.fromkeys(("in_channels", "out_channels"), CHANNELS[settings.dataset]),
        layers_per_block=2,
        block_out_channels=(width, 2 * width, 2 * width),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def _dit(settings: DiffusionSettings) -> Any:
    return library("diffusers").DiTTransformer2DModel(
        **dict.fromkeys(("in_channels", "out_channels"), CHANNELS[settings.dataset]),
        sample_size=settings.image_size,
        patch_size=2,
        num_layers=6,
        num_attention_heads=4,
        attention_head_dim=settings.width,
        num_embeds_ada_norm=CLASSES,
        norm_num_groups=CHANNELS[settings.dataset],
    )


def _autoencoder(settings: DiffusionSettings) -> Any:
    width = settings.width
    return library("diffusers").AutoencoderKL(
        **dict.fromkeys(("in_channels", "out_channels"), CHANNELS[settings.dataset]),
        block_out_channels=(width, 2 * width, 2 * width),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=CODE_CHANNELS,
        norm_num_groups=8,
    )


RECIPE = Recipe(
    module="recipes.diffusion",
    description=__doc__,
    settings=DiffusionSettings,
    task=Diffusion,
    metric=Metric("mse", "mean squared error"),
    libraries=("diffusers",),
)
main = partial(command_line.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
