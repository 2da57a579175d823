"""Errors of the gradients in each step of a training run: how large they are, and whether they add up over the steps.

    python -m benchmarks.errors_along_training --data data
    python -m benchmarks.errors_along_training --models "GPT nano" --policy StochBackward2bit --steps 100

A model of `benchmarks.trained_models` trains under a policy from its first step on. Each step has its gradients
computed a second time, at full precision from the same weights and batch: h - g is the error e of the step. Per weight
tensor there are two figures, and the largest of a step's |e|^2 / |g|^2 over all weights:

- error: the sum of |e|^2 over the steps, in units of the sum of |g|^2;
- coherence: |sum of e|^2 in units of the sum of |e|^2. It is 1 on average for errors of mean 0 that are independent
  from step to step, and the number of steps for an error that is the same in each.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.records import print_table
from benchmarks.trained_models import TASKS, Learner, LossOf, loss_of, settings_of
from brevact.autograd import regions_disabled
from brevact.reports.gradient_passes import as_it_was, gradients
from recipes.policy_names import NamedPolicy, named_policy


class Errors:
    """Sums over steps, of one weight tensor.

    Args:
        like: the weight.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._sum = torch.zeros_like(like, dtype=torch.float64)
        self.squares = self.exact = 0.0

    def add(self, error: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
        """Take the error of a step, and the gradient without it; return their squares."""
        found = float(error.double().square().sum()), float(exact.double().square().sum())
        self._sum += error
        self.squares += found[0]
        self.exact += found[1]
        return found

    @property
    def relative(self) -> float:
        """Sum of |e|^2 in units of that of |g|^2."""
        return self.squares / self.exact if self.exact else float("nan")

    @property
    def coherence(self) -> float:
        """|sum of e|^2 in units of the sum of |e|^2."""
        return float(self._sum.square().sum()) / self.squares if self.squares else float("nan")


def measure(learner: Learner, policy: NamedPolicy, steps: int) -> tuple[dict[str, Errors], float]:
    """Train under a policy.

    Args:
        learner: a model before its first step.
        policy: what each op stores.
        steps: most steps that are taken, of one epoch.

    Returns:
        The errors by name of the weight, and the largest |e|^2 / |g|^2 of a step.
    """
    policy.apply(learner.objective)
    trainer, objective = learner.trainer(), learner.objective.train()
    model = LossOf(objective)
    weights = {name: weight for name, weight in objective.named_parameters() if weight.requires_grad}
    errors, largest = {name: Errors(weight) for name, weight in weights.items()}, 0.0
    for step, (inputs, targets) in enumerate(itertools.islice(learner.train.epoch(1), steps)):
        batch = {"inputs": inputs, "targets": targets}
        with as_it_was(model), regions_disabled():
            exact = gradients(model, batch, loss_of, seed=step)
        objective.zero_grad()
        loss_of(model, batch).backward()
        found = [errors[n].add(w.grad - g, g) for (n, w), g in zip(weights.items(), exact, strict=True)]
        largest = max(largest, sum(e for e, _ in found) / sum(g for _, g in found))
        trainer.optimizer.step()
        trainer.scheduler.step()
    return errors, largest


def rows_of(errors: dict[str, Errors]) -> Iterator[dict[str, str]]:
    """A row a weight tensor, and one of all: the largest coherence first."""
    total, exact = sum(each.squares for each in errors.values()), sum(each.exact for each in errors.values())
    # The coherence of all is the mean of those of the tensors, weighted by their errors.
    coherent = sum(each.coherence * each.squares for each in errors.values() if each.squares)
    yield {"weight": "all", "error": f"{total / exact:.4g}", "coherence": f"{coherent / total if total else 0:.3f}"}
    for name, each in sorted(errors.items(), key=lambda item: -item[1].coherence):
        yield {"weight": name, "error": f"{each.relative:.4g}", "coherence": f"{each.coherence:.3f}"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=["EfficientNetV2 nano"], metavar="MODEL")
    parser.add_argument("--policy", type=named_policy, default=named_policy("DEFAULT"))
    parser.add_argument("--data", type=Path, help="folder that holds CIFAR-10; without it, scikit-learn's digits")
    parser.add_argument("--steps", type=int, default=1_000, help="most steps, of one epoch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps} is not possible: use at least 1")
    for name in options.models:
        learner = Learner(TASKS[name], settings_of(TASKS[name], options.data, seed=options.seed))
        errors, largest = measure(learner, options.policy, options.steps)
        print(f"\n{name}, {options.policy.name}: the largest error of a step is {largest:.4g}\n")
        print_table(list(rows_of(errors)))


if __name__ == "__main__":
    main()
