"""Pictures of discs, squares and triangles in noise, with the box and the class of each."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = ("disc", "square", "triangle")
_MOST = 4  # shapes in a picture
_TRIES = 40
_NOISE = 0.15


@dataclass(frozen=True)
class Pictures:
    """Pictures and the shapes on them.

    Attributes:
        images: N x 3 x size x size, float32, about 0..1.
        targets: of each picture "boxes" (shapes x 4, float32: left, top, right, bottom, in pixels) and "labels"
            (shapes, int64: places in `SHAPES`).
    """

    images: Tensor
    targets: list[Mapping[str, Tensor]]

    def __len__(self) -> int:
        return len(self.images)


def make_pictures(count: int, size: int, seed: int) -> Pictures:
    """Draws pictures with one to four shapes, of a random color each, that hardly overlap."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [_picture(size, generator) for _ in range(count)]
    return Pictures(torch.stack([image for image, _ in drawn]), [target for _, target in drawn])


def _picture(size: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    image = 0.3 + 0.4 * uniform(3, 1, 1).expand(3, size, size).clone()
    wanted = int(torch.randint(1, _MOST + 1, (), generator=generator))
    boxes: list[list[float]] = []
    labels: list[int] = []
    for _ in range(_TRIES):
        if len(boxes) == wanted:
            break
        edge = size * (0.15 + 0.25 * float(uniform()))
        left, top = (float(start) for start in uniform(2) * (size - 1 - edge))
        if any(_overlap(left, edge, x, right - x) and _overlap(top, edge, y, low - y) for x, y, right, low in boxes):
            continue
        label = int(torch.randint(0, len(SHAPES), (), generator=generator))
        inside = _inside(SHAPES[label], size, left, top, edge)
        image = torch.where(inside, uniform(3, 1, 1), image)
        boxes.append([left, top, left + edge, top + edge])
        labels.append(label)
    image += _NOISE * torch.randn(image.shape, generator=generator)
    return image, {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels)}


def _overlap(start: float, length: float, other: float, its: float) -> bool:
    """Whether two intervals have more than a fifth of the shorter one in common."""
    return min(start + length, other + its) - max(start, other) > 0.2 * min(length, its)


def _inside(shape: str, size: int, left: float, top: float, edge: float) -> Tensor:
    """Which pixels a shape covers (size x size)."""
    x = (torch.arange(size) + 0.5 - left) / edge
    y = ((torch.arange(size) + 0.5 - top) / edge)[:, None]
    if shape == "disc":
        return (x - 0.5).square() + (y - 0.5).square() <= 0.25
    if shape == "square":
        return (x >= 0) & (x <= 1) & (y >= 0) & (y <= 1)
    return (y >= 0) & (y <= 1) & ((x - 0.5).abs() <= y / 2)
