"""Every backward quantizer on four kinds of data: its bits, error and time.

    python -m benchmarks.formats --csv docs/formats.csv

Data: standard normal; its positive part, as after ReLU; double Weibull of shape 0.6, long-tailed; and the saved tensors
of a training step of a trained EfficientNetV2 nano on digits. With y the decoded x and norms over all elements:

bits: measured bytes of the storage times 8, divided by the elements.
error: |y - x| / |x|, the root of its mean square over draws.
bias: |E y - x| / |x|; E y is estimated from the draws, less the share of their noise. 0: less than 3 standard
errors of the estimate, as for an unbiased quantizer.
variance: E |y - E y|^2 / |x|^2.
time: of quantizing and of decoding 4.2 million normal values, in medians relative to `clone()` in the same run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import brevact
from benchmarks.quantizers import times
from benchmarks.records import append_rows, print_table
from brevact.autograd.region.settings import DEFAULT_MIN_NUMEL
from brevact.injectors.injector_type import BackwardInjectorType
from recipes.data import LOADERS, Batches
from recipes.models import efficientnetv2

DATA = ("normal", "after ReLU", "long-tailed", "EfficientNetV2")
_TIMED = 1 << 22

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantizers", nargs="+", metavar="NAME", help="leaf quantizers of brevact (default: all)")
    parser.add_argument("--draws", type=int, default=8, help="seeds of stochastic quantizers (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls (default: %(default)s)")
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args()
    rows = list(measure(options.quantizers or list(leaves()), samples(), options.draws, options.repeats))
    print_table(rows)
    if options.csv:
        append_rows(rows, options.csv)


def leaves() -> dict[str, type]:
    """Every quantizer by its name that is lossy and of the backward pass alone."""
    found = {}
    for name, value in vars(brevact).items():
        if not isinstance(value, BackwardInjectorType) or value is brevact.LosslessBackward:
            continue
        if not getattr(brevact.quantizer(value), "quantize_forward", False):
            found[name] = value
    return dict(sorted(found.items()))


def measure(names: Sequence[str], data: Mapping[str, Sequence[Tensor]], draws: int, repeats: int) -> Iterator[Row]:
    """One row per quantizer and kind of data.

    Args:
        names: leaf quantizers.
        data: tensors by the name of their kind.
        draws: seeds of stochastic quantizers, at least 2.
        repeats: timed calls.

    Yields:
        Rows.

    Raises:
        ValueError: a name is not that of a backward quantizer, or there are too few draws.
    """
    if draws < 2:
        raise ValueError(f"draws: got {draws}; a variance needs at least 2")
    known = leaves()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"quantizers: got {', '.join(unknown)}; known are {', '.join(known)}")
    for name in tqdm(names, desc="quantizers"):
        quantizer = brevact.quantizer(known[name])
        quantize, decode = relative_times(quantizer, repeats)
        for kind, parts in data.items():
            yield {
                "quantizer": name,
                "data": kind,
                **{key: f"{value:.3g}" for key, value in errors(quantizer, parts, draws).items()},
                "quantize": f"{quantize:.2f}",
                "decode": f"{decode:.2f}",
            }


def samples() -> dict[str, list[Tensor]]:
    """Tensors of each kind of data, as feature maps (B, C, H, W)."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(16, 64, 16, 16, generator=generator)
    uniform = torch.rand(normal.shape, generator=generator, dtype=torch.float64).clamp(min=2**-53)
    long_tailed = ((-uniform.log()) ** (1 / 0.6)).float() * torch.randn(normal.shape, generator=generator).sign()
    return dict(zip(DATA, ([normal], [normal.relu()], [long_tailed], kept_activations()), strict=True))


def kept_activations(epochs: int = 2) -> list[Tensor]:
    """Saved tensors of a training step of a nano EfficientNetV2 that has learnt digits for a while.

    Args:
        epochs: passes over the images before.

    Returns:
        Floating-point tensors of at least 4096 elements, each storage once, without parameters.
    """
    digits = LOADERS["digits"](Path(), None, None)
    device = torch.device("cpu")
    batches = Batches(digits.train, digits.normalization, 32, device=device, train=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = efficientnetv2("nano", classes=10, channels_in=1, image_size=digits.image_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for epoch in range(1, epochs + 1):
            for images, labels in batches.epoch(epoch):
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, Tensor] = {}

        def collect(x: Tensor) -> Tensor:
            address = x.untyped_storage().data_ptr()
            if x.is_floating_point() and x.numel() >= DEFAULT_MIN_NUMEL and address not in own:
                kept.setdefault(address, x.detach())  # a held storage is not reused for another tensor
            return x

        images, labels = next(batches.epoch(0))
        with torch.autograd.graph.saved_tensors_hooks(collect, lambda x: x):
            nn.functional.cross_entropy(model(images[:8]), labels[:8])
    return [x.clone() for x in kept.values()]


def errors(quantizer: Any, parts: Sequence[Tensor], draws: int) -> dict[str, float]:
    """Measured bits per element, relative error, bias and variance."""
    nbytes = numel = 0.0
    size = error = offset = spread = uncertainty = 0.0
    for index, x in enumerate(parts):
        exact = x.double()
        seeds = range(index * draws, (index + 1) * draws) if quantizer.is_stochastic else (0,)
        packed = [quantizer.quantize(x, seed=seed) for seed in seeds]
        decoded = torch.stack([each.dequantize().double() for each in packed])
        mean = decoded.mean(0)
        noise = decoded.var(0) / len(seeds) if len(seeds) > 1 else torch.zeros_like(mean)  # variance of the mean
        nbytes, numel = nbytes + sum(each.nbytes for each in packed) / len(seeds), numel + x.numel()
        size += float(exact.square().sum())
        error += float((decoded - exact).square().sum()) / len(seeds)
        spread += float(noise.sum()) * len(seeds)
        offset += float(((mean - exact).square() - noise).sum())
        uncertainty += float(2 * noise.square().sum())
    is_biased = offset > 3 * math.sqrt(uncertainty)
    return {
        "bits": 8 * nbytes / numel,
        "error": math.sqrt(error / size),
        "bias": math.sqrt(offset / size) if is_biased else 0.0,
        "variance": spread / size,
    }


def relative_times(quantizer: Any, repeats: int) -> tuple[float, float]:
    """Median time of quantizing and of decoding, relative to `clone()`, measured in turns."""
    x = torch.randn(64, 64, 32, _TIMED >> 17)
    packed = quantizer.quantize(x, seed=0)
    calls = {
        "clone": x.clone,
        "quantize": lambda: quantizer.quantize(x, seed=0),
        "decode": lambda: packed.dequantize(),
    }
    clone, quantize, decode = times(calls, repeats).values()
    return quantize / clone, decode / clone


if __name__ == "__main__":
    main()
