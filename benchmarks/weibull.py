"""Variance and time of the Weibull quantizer beside those of uniform ones of the same width.

    python -m benchmarks.weibull --csv weibull.csv

variance: mean of (b - x)(x - a), a and b the levels around x, relative to |x|^2: what stochastic rounding adds.
even: the same with evenly spaced levels in buckets of the same size, and of 512 elements, the default of
`StochBackward<N>bit`; ratios are to these. Times are medians of calls in turns, of quantizing and of decoding into a
buffer; ratios are to the uniform quantizer with buckets of 512.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.records import write_rows
from brevact.quantizers import UniformQuantizer, WeibullQuantizer

Row = dict[str, object]


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 20, help="elements for variances (default: %(default)s)")
    parser.add_argument("--timed", type=int, default=1 << 24, help="elements for times (default: %(default)s)")
    parser.add_argument("--bucket-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9, help="timed calls (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args()
    if options.numel % math.lcm(512, options.bucket_size):
        parser.error(f"--numel {options.numel}: not whole buckets of 512 and of {options.bucket_size}")
    torch.set_num_threads(options.threads)
    write_rows(list(measure(options.numel, options.timed, options.bucket_size, options.repeats)), options.csv)


def samples(numel: int) -> dict[str, Tensor]:
    """Values of each distribution.

    Args:
        numel: how many.

    Returns:
        (numel,) float32 tensors by name.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(numel, generator=generator)
    sign = torch.randn(numel, generator=generator).sign()
    exponential = -torch.rand(numel, generator=generator, dtype=torch.float64).clamp(min=2**-53).log()
    functional = torch.nn.functional
    return {
        "double Weibull 0.5": (exponential**2).float() * sign,
        "double Weibull 0.7": (exponential ** (1 / 0.7)).float() * sign,
        "Laplace": exponential.float() * sign,
        "normal": normal,
        "normal after ReLU": normal.relu(),
        "normal after SiLU": functional.silu(normal),
        "normal after GELU": functional.gelu(normal),
        "log-normal": normal.exp(),
        "normal after dropout": torch.where(sign > 0, normal * 2, 0.0),
        "even": torch.rand(numel, generator=generator),
    }


def measure(numel: int, timed: int, bucket_size: int, repeats: int) -> Iterator[Row]:
    """One row a width and distribution.

    Args:
        numel: elements for variances.
        timed: elements for times.
        bucket_size: of the Weibull quantizer.
        repeats: timed calls.

    Yields:
        Rows.
    """
    data = samples(numel)
    for bit_width in (2, 3, 4):
        quantizer = WeibullQuantizer(bit_width=bit_width, bucket_size=bucket_size)
        quantize, decode = _times(timed, repeats, UniformQuantizer(bit_width=bit_width), quantizer)
        for name, x in data.items():
            packed = quantizer.quantize(x, seed=0)
            grid = quantizer.grid(quantizer.geometry(packed.layout), packed.tensors[1:], x.device)
            variance = _variance(x, grid.levels)
            same, default = (_even_variance(x, bit_width, size) for size in (bucket_size, 512))
            yield {
                "bit_width": bit_width,
                "bucket_size": bucket_size,
                "data": name,
                "bits": f"{8 * packed.nbytes / numel:.3f}",
                "variance": f"{variance / float(x.double().square().mean()):.3g}",
                "to_even_same_bucket": f"{variance / same:.3f}",
                "to_even_512": f"{variance / default:.3f}",
                "quantize_to_uniform": f"{quantize:.2f}",
                "decode_to_uniform": f"{decode:.2f}",
            }


def _variance(x: Tensor, levels: Tensor) -> float:
    rows = x.view(len(levels), -1)
    above = torch.searchsorted(levels, rows, right=True).clamp(1, levels.shape[1] - 1)
    a, b = (levels.gather(1, index).double() for index in (above - 1, above))
    return float(((b - rows) * (rows - a)).mean())


def _even_variance(x: Tensor, bit_width: int, bucket_size: int) -> float:
    packed = UniformQuantizer(bit_width=bit_width, bucket_size=bucket_size).quantize(x, seed=0)
    return _variance(x, packed.minimum[:, None] + packed.scale[:, None].float() * torch.arange(2.0**bit_width))


def _times(numel: int, repeats: int, uniform: UniformQuantizer, weibull: WeibullQuantizer) -> tuple[float, float]:
    """Ratios of median times of quantizing and of decoding."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    buffer = torch.empty_like(x)
    packed = [quantizer.quantize(x, seed=0) for quantizer in (uniform, weibull)]
    calls: tuple[Callable[[], object], ...] = (
        lambda: uniform.quantize(x, seed=0),
        lambda: weibull.quantize(x, seed=0),
        lambda: packed[0].dequantize(out=buffer),
        lambda: packed[1].dequantize(out=buffer),
    )
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, taken in zip(calls, found, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    medians = [statistics.median(taken[1:]) for taken in found]  # the first calls warm up
    return medians[1] / medians[0], medians[3] / medians[2]


if __name__ == "__main__":
    main()
