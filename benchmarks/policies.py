"""Where a model needs its bits: gradient errors of trained models when parts of them are stored more finely.

    python -m benchmarks.policies --csv benchmarks/results/policies.csv

Each model of the recipes learns for some steps at full precision. Then, on fresh batches, the gradient h of a policy is
compared with the exact one g: error is |h - g| / |g| over all weights, root mean square over seeds and batches; kept
are measured bytes. Policies: one quantizer for everything; 2 bits with one group of modules at 4 bits, which says what
the bits are worth there; and those that the package ships.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import brevact
from benchmarks.model_zoo import Subject
from benchmarks.models import gradient, quantized, relative_error, root_mean_square
from benchmarks.records import append_rows, check_columns, print_table
from brevact import StochBackward2bit, StochBackward4bit
from brevact.policies import computes_attention, is_activation_function, is_norm
from recipes import char_gpt, efficientnetv2, vit
from recipes.training import Objective

Row = dict[str, str]
COLUMNS = ("model", "policy", "kept", "error")


def is_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a convolution or a linear layer."""
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


GROUPS = {
    "norms": is_norm,
    "activation functions": is_activation_function,
    "convolutions and linear layers": is_linear,
    "attention": computes_attention,
    "loss": lambda name, module: isinstance(module, nn.CrossEntropyLoss),
}
RECIPES = {
    "EfficientNetV2 nano": (efficientnetv2.RECIPE, {}),
    "ViT nano": (vit.RECIPE, {}),
    "GPT nano": (char_gpt.RECIPE, {"train_size": 60_000, "test_size": 10_000}),
}


class OnlyLoss(nn.Module):
    """A model and its loss, without the outputs."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.objective(inputs, targets)[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=80, help="training steps before (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=1, help="to compare gradients on (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="seeds a batch (default: %(default)s)")
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    if options.csv:
        check_columns(options.csv, COLUMNS)
    rows = []
    for name in options.models:
        model, batches = trained(name, options.steps, options.batches)
        rows += measure(name, model, batches, options.draws)
    print_table(rows)
    if options.csv:
        append_rows(rows, options.csv)


def trained(name: str, steps: int, count: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A model that has learnt for some steps, and batches of its test data.

    Args:
        name: key of `RECIPES`.
        steps: of AdamW.
        count: batches.
    """
    recipe, changes = RECIPES[name]
    settings = recipe.settings(**changes)
    data = recipe.load_data(settings)
    train, test = recipe.make_batches(settings, data, torch.device("cpu"))
    torch.manual_seed(0)
    model = OnlyLoss(Objective(recipe.build_model(settings, data, recipe.layers), settings.label_smoothing))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    endless = itertools.chain.from_iterable(train.epoch(number) for number in itertools.count(1))
    for inputs, targets in tqdm(itertools.islice(endless, steps), total=steps, desc=name):
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = itertools.islice(test.epoch(), count)
    return model, [{"inputs": inputs, "targets": targets} for inputs, targets in pairs]


def measure(name: str, model: nn.Module, batches: list[dict[str, Tensor]], draws: int) -> Iterator[Row]:
    """One row a policy.

    Args:
        name: of the model.
        model: returns a loss.
        batches: its keyword arguments.
        draws: seeds a batch.

    Yields:
        Rows with the keys `COLUMNS`.
    """
    for label, policy in tqdm(candidates(model).items(), desc=name):
        errors = []
        for batch in batches:
            plain = Subject(model, batch)
            noisy = quantized(plain, policy)
            errors += [relative_error(gradient(noisy, seed), gradient(plain, seed)) for seed in range(draws)]
        report = brevact.memory_report(noisy.model, batches[0])
        yield {
            "model": name,
            "policy": label,
            "kept": f"{report.saved_bytes / 2**20:.3f} MiB",
            "error": f"{root_mean_square(errors):.3f}",
        }


def candidates(model: nn.Module) -> dict[str, Any]:
    """The policies to compare, of which the rules match something in the model."""
    found: dict[str, Any] = {f"{bits} bits": getattr(brevact, f"StochBackward{bits}bit") for bits in (2, 3, 4)}
    modules = list(model.named_modules())
    for group, rule in GROUPS.items():
        if any(rule(name, module) for name, module in modules):
            found[f"2 bits, {group} 4"] = {rule: StochBackward4bit, "*": StochBackward2bit}
    return found | {"CONV_NET": brevact.CONV_NET, "TRANSFORMER": brevact.TRANSFORMER}


if __name__ == "__main__":
    main()
