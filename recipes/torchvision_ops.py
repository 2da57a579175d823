"""Let torchvision, timm and transformers be imported where torchvision's compiled ops do not fit the torch at hand.

Torchvision's wheels are compiled for torch's CUDA build; on torch's CPU build `import torchvision` raises, though
classifiers need none of those ops. Declared without an implementation, they are found, and raise when they are called.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

#: What torchvision describes to the compiler when it is imported.
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
