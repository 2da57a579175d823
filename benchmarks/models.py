"""Real architectures with random weights: what they keep for backward, and how far off their gradients are.

    python -m benchmarks.models --draws 4 --csv benchmarks/results/models.csv

For each model of `benchmarks.model_zoo`, and of `benchmarks.image_models` where timm and torchvision are installed, and
each backward quantizer, a training step on random data:

kept: measured bytes of the distinct storages that autograd keeps, weights left out, plain and quantized.
error: |h - g| / |g| over all weight gradients, h with stochastic rounding to 8 bits or to 2 bits and g without.
along g: <h, g> / <g, g> at 2 bits, mean over seeds and its standard error; 1 for an unbiased gradient.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import brevact
from benchmarks.model_zoo import MODELS, Subject, build, loss_of
from benchmarks.records import append_rows, check_columns, print_table

Row = dict[str, str]

try:
    from benchmarks.image_models import IMAGE_MODELS
except ImportError:  # timm and torchvision are not installed
    IMAGE_MODELS = {}

#: Builders of all models by name.
BUILDERS = {**MODELS, **IMAGE_MODELS}
COLUMNS = ("model", "parameters", "plain", "kept", "ratio", "forward", "error_8bit", "error_2bit", "along_gradient")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BUILDERS, default=list(BUILDERS), metavar="MODEL")
    parser.add_argument("--draws", type=int, default=16, help="seeds (default: %(default)s)")
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    if options.csv:
        check_columns(options.csv, COLUMNS)
    transformers.logging.set_verbosity_error()
    rows = list(measure(tqdm(options.models, unit="model"), options.draws))
    print_table(rows)
    if options.csv:
        append_rows(rows, options.csv)


def measure(names: Sequence[str], draws: int) -> Iterator[Row]:
    """One row a model.

    Args:
        names: keys of `BUILDERS`.
        draws: seeds, at least 2.

    Yields:
        Rows with the keys `COLUMNS`.
    """
    for name in names:
        plain = build(name, builders=BUILDERS)
        eight, two = (quantized(plain, policy) for policy in (brevact.StochBackward8bit, brevact.StochBackward2bit))
        report = brevact.memory_report(two.model, two.batch)
        with torch.random.fork_rng([]):
            expected = [gradient(plain, seed) for seed in range(draws)]
            errors = [relative_error(gradient(eight, seed), expected[seed]) for seed in range(2)]
            pairs = [(gradient(two, seed), expected[seed]) for seed in range(draws)]
            equal = all(torch.equal(loss_at(two, seed), loss_at(plain, seed)) for seed in range(2))
        along, error_of_mean = mean_projection(pairs)
        yield {
            "model": name,
            "parameters": f"{sum(p.numel() for p in plain.model.parameters()) / 1e6:.2f} M",
            "plain": f"{report.plain_bytes / 2**20:.2f} MiB",
            "kept": f"{report.saved_bytes / 2**20:.2f} MiB",
            "ratio": f"{report.ratio:.1f}",
            "forward": "bit-equal" if equal else "differs",
            "error_8bit": f"{root_mean_square(errors):.4f}",
            "error_2bit": f"{root_mean_square([relative_error(*pair) for pair in pairs]):.2f}",
            "along_gradient": f"{along:.3f} ± {error_of_mean:.3f}",
        }


def quantized(subject: Subject, policy: Any) -> Subject:
    """The same model with a policy."""
    return Subject(brevact.quantize_backward(copy.deepcopy(subject.model), policy), subject.batch)


def loss_at(subject: Subject, seed: int) -> Tensor:
    """Loss at a seed, which fixes dropout and the noise of quantizers."""
    torch.manual_seed(seed)
    return loss_of(subject).detach()


def gradient(subject: Subject, seed: int) -> Tensor:
    """All weight gradients in one vector, at a seed."""
    subject.model.zero_grad()
    torch.manual_seed(seed)
    loss_of(subject).backward()
    return torch.cat([p.grad.flatten() for p in subject.model.parameters() if p.grad is not None])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is expected."""
    return float((found - expected).norm() / expected.norm())


def mean_projection(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean of <h, g> / <g, g> over pairs (h, g), and its standard error."""
    values = torch.tensor([float(h @ g / (g @ g)) for h, g in pairs])
    return float(values.mean()), float(values.std() / math.sqrt(len(pairs)))


def root_mean_square(values: Sequence[float]) -> float:
    """Root of the mean of the squares."""
    return math.sqrt(sum(value * value for value in values) / len(values))


if __name__ == "__main__":
    main()
