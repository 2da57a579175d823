"""Pack gradients for other processes, in a size and format that all processes know."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from brevact.quantizers import (
    ActivationQuantizer,
    DualPrecisionQuantizer,
    MixingQuantizer,
    PackedActivation,
    SampleQuantizer,
    UniformQuantizer,
    WeibullQuantizer,
)
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int
from brevact.quantizers.formats.sign_magnitude.quantizer import SignMagnitudeLevels

#: Packs a tensor losslessly into its own bytes.
AS_IT_IS = UniformQuantizer(bit_width=32)

_ALL_RANKS = -1
_UNBIASED = (UniformQuantizer, WeibullQuantizer, DualPrecisionQuantizer, SampleQuantizer, SignMagnitudeLevels)


def pack(quantizer: ActivationQuantizer, x: Tensor, place: tuple[int, int, int], rank: int) -> PackedActivation:
    """Pack a gradient with this rank's random bits, and in the size that all ranks use.

    `place` is the run's seed, the step and the parameter's number, the same on all ranks.
    """
    if isinstance(quantizer, MixingQuantizer):
        quantizer = quantizer.with_drawn_size(x.numel(), _seed(*place, _ALL_RANKS))
    return quantizer.quantize(x, _seed(*place, rank))


def is_unbiased(quantizer: ActivationQuantizer) -> bool:
    """Return whether a quantizer is lossless or rounds at random between levels that span a bucket.

    Others count as biased: nearest rounding, grids that clip, and users' quantizers.
    """
    if isinstance(quantizer, MixingQuantizer):
        return is_unbiased(quantizer.low) and is_unbiased(quantizer.high)
    if any(getattr(quantizer, name, False) for name in ("is_exact", "is_lossless", "keeps_elements")):
        return True
    return isinstance(quantizer, _UNBIASED) and quantizer.is_stochastic


def check_feedback(quantizer: ActivationQuantizer) -> None:
    """Raise a ValueError if a quantizer's error is not smaller than its input, measured on 4096 normal values."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), device="cpu")
    if (pack(quantizer, x, (0, 0, 0), 0).dequantize() - x).norm() >= x.norm():
        raise ValueError(
            f"error_feedback: got True with {brief(quantizer)}, whose errors exceed the gradients: they would grow "
            "from step to step; accepted is a quantizer of smaller errors, StochBackward2bit, or error_feedback=False"
        )


def check_count(name: str, value: object, at_least: int | None = None) -> None:
    """Raise a TypeError unless the value is an int, and a ValueError if it is too small."""
    check_int(name, value)
    if at_least is not None and value < at_least:  # type: ignore[operator]
        raise ValueError(f"{name}: got {value}; accepted is an int of at least {at_least}")


def check_seed(seed: int) -> None:
    """Raise a TypeError unless the seed is an int, and a ValueError if it exceeds 64 bits."""
    check_count("seed", seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: got {seed}; accepted is an int from -2**63 to 2**63 - 1")


def check_quantizer(quantizer: object) -> None:
    """Raise a TypeError unless this is an activation quantizer; an injector is not."""
    if isinstance(quantizer, type) or not callable(getattr(quantizer, "quantize", None)):
        raise TypeError(
            f"quantizer: got {brief(quantizer)}; accepted is an activation quantizer, such as what "
            "brevact.quantizer(StochBackward4bit) returns"
        )


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
