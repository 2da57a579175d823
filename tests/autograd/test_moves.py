"""Functions that move elements store nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.autograd.exactness import MAP, OTHER, assert_exact

NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"interpolate {mode}": lambda x, mode=mode: F.interpolate(x, scale_factor=1.5, mode=mode)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "interpolate antialias": lambda x: F.interpolate(x, size=(7, 5), mode="bicubic", antialias=True),
    "interpolate linear": lambda x: F.interpolate(x.flatten(2), size=50, mode="linear", align_corners=True),
    "interpolate trilinear": lambda x: F.interpolate(x[None], size=(3, 6, 7), mode="trilinear"),
    "interpolate area 1-d": lambda x: F.interpolate(x.flatten(2), scale_factor=0.5, mode="area"),
    **{
        f"pad {mode} {dims}-d": lambda x, mode=mode, dims=dims: F.pad(x[None], (1, 2) * dims, mode=mode)[0]
        for mode, dims in (("constant", 2), ("reflect", 3), ("replicate", 3), ("circular", 3))
    },
    "pad reflect 1-d": lambda x: F.pad(x[0], (3, 1), mode="reflect"),
    "pad replicate unbatched": lambda x: F.pad(x[0], (3, 1, 1, 0), mode="replicate"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 3),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "unfold": lambda x: F.unfold(x, (3, 2), dilation=2, stride=2),
    "fold": lambda x: F.fold(x.flatten(2)[:, :, :36], (7, 7), 2),
    "cat": lambda x: torch.cat([x, 2 * x], 1),
    "stack": lambda x: torch.stack([x, x], -1),
    "add": lambda x: x + OTHER,
    "sub": lambda x: torch.sub(OTHER, x, alpha=2),
    "chunk": lambda x: x.chunk(3, 2)[1],
    "split": lambda x: torch.split(x, [1, 3], 1)[1],
    "roll": lambda x: x.roll((3, 1), (2, 0)),
    "permute": lambda x: x.permute(0, 2, 1, 3).reshape(3, 12, -1),
    "flip": lambda x: x.flip(1, 2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "sum": lambda x: x.sum((0, 2)),
    "mean": lambda x: x.mean(1),
    "cumsum": lambda x: x.cumsum(2),
    "lerp by a number": lambda x: torch.lerp(x, OTHER, 0.3),
}


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("function", NOTHING.values(), ids=NOTHING)
def test_moving_elements_stores_nothing(function):
    assert assert_exact(function, torch.randn(MAP)).tensors == []


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_of_half_precision_under_autocast_has_its_gradient(mode, dtype):
    def pad(x):
        with torch.autocast("cpu", dtype=dtype):
            return F.pad(x, (1, 2, 0, 1), mode)

    assert_exact(pad, torch.randn(MAP).to(dtype))
