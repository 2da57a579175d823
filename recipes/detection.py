"""Detection of shapes by torchvision's FCOS, an anchor-free detector, on pictures drawn on the spot.

    python -m recipes.detection                          # the table: plain, checkpoint, DEFAULT, RECOMPUTE
    python -m recipes.detection --image 128 --epochs 20 --seeds 0

A ResNet with a block a stage, a pyramid of features and the two heads of FCOS learn to find discs, squares and
triangles in noise (`recipes/data/shapes.py`). The metric is AP50: the area below precision over recall, with boxes that
overlap by a half counted as found, averaged over the classes.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from recipes import command_line
from recipes.data.shapes import SHAPES, Pictures, make_pictures
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
from recipes.torchvision_ops import box_overlap, supply_missing_nms

#: The detector pads pictures to multiples of it.
MULTIPLE = 32
_OF_32 = (lambda value: value >= 32 and value % 32 == 0, "use a multiple of 32, such as 64")
_TEST_SEED = 2**20  # of the pictures to test on, which are those of no run's training
_SCORE = 0.05  # detections of lower scores are left out

Target = Mapping[str, Tensor]
Batch = tuple[list[Tensor], list[Target]]


@dataclass(frozen=True)
class DetectionSettings(Settings):
    epochs: int = setting(6, "passes over the training pictures", least=1)
    batch_size: int = setting(4, "pictures in a step", least=1)
    lr: float = setting(2e-3, "largest learning rate of AdamW", check=ABOVE_0)
    image: int = setting(96, "pixels along each edge of a picture")
    features: int = setting(64, "channels of the pyramid and the heads", check=_OF_32)
    train_size: int = setting(256, "pictures to train on")
    test_size: int = setting(96, "pictures to test on", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image < 2 * MULTIPLE or self.image % MULTIPLE:
            below = max(2 * MULTIPLE, self.image // MULTIPLE * MULTIPLE)
            raise RecipeError(
                f"--image {self.image} is not possible: the detector halves pictures five times; use a multiple of "
                f"{MULTIPLE}, such as {below} or {below + MULTIPLE}"
            )
        if self.train_size < self.batch_size:
            raise RecipeError(
                f"--batch-size {self.batch_size} is not possible with {self.train_size} pictures; use "
                f"{self.train_size} at most, or --train-size {self.batch_size}"
            )


class DetectionTask(Task):
    def __init__(self, settings: DetectionSettings, seed: int, device: torch.device) -> None:
        super().__init__(settings, seed, device)
        self.model = make_detector(settings).to(device)
        self.steps_per_epoch = settings.train_size // settings.batch_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=1e-4)
        self.scheduler = cosine(self.optimizer, settings.epochs * self.steps_per_epoch)

    @cached_property
    def train_pictures(self) -> Pictures:
        return make_pictures(self.settings.train_size, self.settings.image, self.seed)

    @cached_property
    def test_pictures(self) -> Pictures:
        """The same for all seeds."""
        return make_pictures(self.settings.test_size, self.settings.image, _TEST_SEED)

    def batches(self, epoch: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        order = torch.randperm(self.settings.train_size, generator=generator)
        for step in range(self.steps_per_epoch):
            chosen = order[step * self.settings.batch_size :][: self.settings.batch_size].tolist()
            yield self._batch(self.train_pictures, chosen)

    def _batch(self, pictures: Pictures, chosen: Sequence[int]) -> Batch:
        targets = [{name: x.to(self.device) for name, x in pictures.targets[number].items()} for number in chosen]
        return [pictures.images[number].to(self.device) for number in chosen], targets

    def loss(self, batch: Batch) -> Tensor:
        losses = self.model(*batch)  # of classes, boxes and centers
        return torch.stack(list(losses.values())).sum()

    @torch.no_grad()
    def detect(self, pictures: Pictures) -> list[Target]:
        """Boxes, labels and scores that the model finds in each picture."""
        self.model.eval()
        found: list[Target] = []
        for start in range(0, len(pictures), self.settings.batch_size):
            images = pictures.images[start : start + self.settings.batch_size].to(self.device)
            found += [{name: x.cpu() for name, x in each.items()} for each in self.model(list(images))]
        self.model.train()
        return found

    def evaluate(self) -> float:
        return mean_average_precision(self.detect(self.test_pictures), self.test_pictures.targets, len(SHAPES))

    def use_checkpoints(self) -> None:
        block = library("torchvision.models.resnet").BasicBlock
        heads = (self.model.head.classification_head.conv, self.model.head.regression_head.conv)
        checkpoint_each(chain((each for each in self.model.modules() if isinstance(each, block)), heads))

    def show(self, path: Path) -> None:
        """Draws the model's detections in test pictures."""
        few = Pictures(self.test_pictures.images[:6], self.test_pictures.targets[:6])
        figure = Figure(figsize=(9, 6.2), layout="constrained")
        for axes, image, found in zip(figure.subplots(2, 3).flat, few.images, self.detect(few), strict=False):
            axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
            axes.set(xticks=[], yticks=[])
            for box, label, score in zip(*(found[name] for name in ("boxes", "labels", "scores")), strict=True):
                if score > 0.3:
                    left, top, right, bottom = box.tolist()
                    corner, style = (left, top), {"fill": False, "edgecolor": f"C{int(label)}", "linewidth": 2}
                    axes.add_patch(Rectangle(corner, right - left, bottom - top, **style))
                    axes.text(*corner, f"{SHAPES[label]} {score:.2f}", fontsize=8, backgroundcolor="white")
        save(figure, path)


def make_detector(settings: DetectionSettings) -> nn.Module:
    """FCOS on a ResNet with a block a stage, its pyramid and heads narrower than for photographs."""
    resnets = library("torchvision.models.resnet")
    resnet = resnets.ResNet(resnets.BasicBlock, [1, 1, 1, 1])
    supply_missing_nms()
    pyramid = library("torchvision.ops.feature_pyramid_network")
    utils = library("torchvision.models.detection.backbone_utils")
    width = settings.features
    backbone = utils.BackboneWithFPN(
        resnet,
        return_layers={"layer2": "0", "layer3": "1", "layer4": "2"},
        in_channels_list=[128, 256, 512],
        out_channels=width,
        extra_blocks=pyramid.LastLevelP6P7(width, width),
    )
    return library("torchvision.models.detection").FCOS(
        backbone, len(SHAPES), min_size=settings.image, max_size=settings.image, score_thresh=_SCORE
    )


def mean_average_precision(
    found: Sequence[Target], targets: Sequence[Target], classes: int, overlap: float = 0.5
) -> float:
    """The mean over the classes of the area below precision over recall.

    Args:
        found: of each picture "boxes" (N, 4), "labels" (N) and "scores" (N).
        targets: of each picture "boxes" (M, 4) and "labels" (M); each class is there.
        classes: how many there are.
        overlap: least intersection over union of a box that is found.

    Returns:
        A number in 0..1.
    """
    return sum(average_precision(found, targets, label, overlap) for label in range(classes)) / classes


def average_precision(found: Sequence[Target], targets: Sequence[Target], label: int, overlap: float) -> float:
    """Area below precision over recall of a class; the precision at a recall is the best at that or a higher one."""
    hits: list[tuple[float, bool]] = []  # scores, and whether the detection is the first of its target
    total = 0
    for each, target in zip(found, targets, strict=True):
        wanted = target["boxes"][target["labels"] == label]
        total += len(wanted)
        own = each["labels"] == label
        scores, order = each["scores"][own].sort(descending=True)
        free = torch.ones(len(wanted), dtype=torch.bool)
        for score, overlaps in zip(scores.tolist(), box_overlap(each["boxes"][own][order], wanted), strict=True):
            overlaps = overlaps * free
            best = int(overlaps.argmax()) if len(wanted) else 0
            hit = len(wanted) > 0 and float(overlaps[best]) >= overlap
            if hit:
                free[best] = False
            hits.append((score, hit))
    hits.sort(key=lambda pair: -pair[0])
    correct = torch.tensor([hit for _, hit in hits]).cumsum(0)
    precision = correct / torch.arange(1, len(hits) + 1)
    best_from = precision.flip(0).cummax(0).values.flip(0) if len(hits) else precision
    return float(sum(best_from[place] for place, (_, hit) in enumerate(hits) if hit)) / total


RECIPE = Recipe(
    module="recipes.detection",
    description=__doc__,
    settings=DetectionSettings,
    task=DetectionTask,
    metric=Metric("ap50", "AP50"),
    libraries=("torchvision",),
)
main = partial(command_line.main, RECIPE)

if __name__ == "__main__":
    sys.exit(main())
