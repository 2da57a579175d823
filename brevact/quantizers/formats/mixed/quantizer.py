"""Mixing of two widths: some buckets of a tensor are stored at a higher width than the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from brevact.quantizers.checks import check_bit_width, check_number
from brevact.quantizers.formats.mixed.mixing_quantizer import MixingQuantizer
from brevact.quantizers.formats.uniform.quantizer import BIT_WIDTHS, Granularity, UniformQuantizer
from brevact.quantizers.rounding import Rounding


@dataclass(frozen=True, kw_only=True)
class MixedQuantizer(MixingQuantizer):
    """Uniform quantizer that stores each bucket at `mix_bit_width` with probability `mix_prob`, else at `bit_width`.

    Buckets are drawn independently. An element takes (1 - mix_prob) * bit_width + mix_prob * mix_bit_width bits on
    average; each bucket adds the metadata of `UniformQuantizer` and one bit. Graphs of `torch.compile` and CUDA graphs
    draw the number of wider buckets once, when they are made, and in each run which buckets these are.

    Source: J. Li, master's thesis, Heidelberg University, 2025, section 5.7. Differs: there every element is stored at
    the higher width.

    >>> q = MixedQuantizer(bit_width=2, mix_bit_width=4, mix_prob=0.5, bucket_size=64)
    >>> q.quantize(torch.linspace(0, 1, 6400), seed=0).dequantize().shape
    torch.Size([6400])

    Args:
        bit_width: Bits a code of most buckets.
        mix_bit_width: Bits a code of the others.
        mix_prob: Probability of `mix_bit_width`, from 0 to 1.
        rounding: Nearest or stochastic; which buckets are mixed in is random either way.
        bucket_size: Elements that share a scale and a width; None for the whole tensor.
        granularity: `Granularity.BUCKET`, or `Granularity.TENSOR` for one width a tensor (the thesis' global variant).
        scale_dtype: See `UniformQuantizer`.
        minimum_dtype: See `UniformQuantizer`.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument has the wrong type.
    """

    bit_width: int = 2
    mix_bit_width: int = 4
    mix_prob: float = 0.5
    rounding: Rounding = Rounding.STOCHASTIC
    bucket_size: int | None = 512
    granularity: Granularity = Granularity.BUCKET
    scale_dtype: torch.dtype = torch.bfloat16
    minimum_dtype: torch.dtype = torch.float32

    kind = UniformQuantizer
    mixed = ("bit_width", "mix_bit_width", "mix_prob")

    def __post_init__(self) -> None:
        check_number("mix_prob", self.mix_prob, 0, 1)
        for name in ("bit_width", "mix_bit_width"):
            check_bit_width(name, getattr(self, name), BIT_WIDTHS[:-1])
        plain = self._of("bit_width")  # checks the rest
        if plain.granularity not in (Granularity.BUCKET, Granularity.TENSOR):
            raise ValueError(
                f"granularity: got {self.granularity}; accepted are Granularity.BUCKET and Granularity.TENSOR: widths "
                "are mixed by buckets or by tensors"
            )
        object.__setattr__(self, "rounding", plain.rounding)
        object.__setattr__(self, "granularity", plain.granularity)
