"""Let torchvision, timm and transformers be imported where torchvision's compiled ops do not fit the torch at hand.

Torchvision's wheels are compiled for torch's CUDA build; on torch's CPU build `import torchvision` raises, though
classifiers need none of those ops. Declared without an implementation, they are found, and raise when they are called.
Detectors need one of them where they predict, non-maximum suppression, which is here in plain torch.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

#: Ops that torchvision describes to the compiler at its import.
_POOLING = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")
OPS = (
    "nms",
    "qnms",
    "deform_conv2d",
    "_deform_conv2d_backward",
    *_POOLING,
    *(f"_{name}_backward" for name in _POOLING),
)
_library = torch.library.Library("torchvision", "FRAGMENT")


def declare_missing_ops() -> None:
    """Declare the ops that `import torchvision` asks for, unless its compiled library can be loaded."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    for compiled in Path(found.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(compiled)
        except (OSError, RuntimeError):
            continue
        return
    for name in OPS:
        if not hasattr(torch.ops.torchvision, name):
            _library.define(f"{name}(Tensor input) -> Tensor")


def supply_missing_nms() -> None:
    """Let torchvision's detectors predict without its compiled library; where that is there, do nothing."""
    from torchvision.extension import _has_ops
    from torchvision.ops import boxes

    if not _has_ops():
        boxes.batched_nms = batched_nms


def batched_nms(boxes: Tensor, scores: Tensor, idxs: Tensor, iou_threshold: float) -> Tensor:
    """Non-maximum suppression within each class, as `torchvision.ops.batched_nms`.

    >>> boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 3], [0, 0, 2, 2]])
    >>> batched_nms(boxes, torch.tensor([0.5, 0.9, 0.7]), torch.tensor([0, 0, 1]), iou_threshold=0.6)
    tensor([1, 2])

    Args:
        boxes: left, top, right and bottom of N boxes (N, 4).
        scores: of the boxes (N).
        idxs: their classes (N).
        iou_threshold: boxes that overlap by more with one of a higher score are left out.

    Returns:
        Indices of the boxes that stay, of the highest score first (int64).
    """
    order = scores.argsort(descending=True)
    overlap = box_overlap(boxes, boxes) > iou_threshold
    overlap &= idxs[:, None] == idxs
    kept: list[int] = []
    left = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    for index in order.tolist():
        if left[index]:
            kept.append(index)
            left &= ~overlap[index]
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


def box_overlap(one: Tensor, other: Tensor) -> Tensor:
    """Intersections over unions (N, M) of boxes (N, 4) and (M, 4)."""
    sides = torch.minimum(one[:, None, 2:], other[:, 2:]) - torch.maximum(one[:, None, :2], other[:, :2])
    common = sides.clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (one, other)]
    return common / (areas[0][:, None] + areas[1] - common)
