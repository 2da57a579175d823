"""The backward policy of a run, from the words that its row holds, attached to its model.

StochBackward2bit:bucket_size=64           what `recipes.policy_names` reads
fit:bytes=DEFAULT                          what `recipes.fitted_policies` reads, fitted before the first step
StochBackward2bit4bitMix@linear:0.8:0.2    a mixture whose probability follows `brevact.MixSchedule` over the run
DEFAULT@adaptive:100                       widths that `brevact.Adaptive` moves every 100 steps, at the policy's bytes
"""

import argparse
import itertools
from typing import Any

from torch import Tensor, nn

import brevact
from recipes.errors import RecipeError
from recipes.fitted_policies import FittedPolicy, policy_or_fit
from recipes.recipe import BatchSource
from recipes.training import Trainer

#: Batches that a policy is fitted on.
FITTED_ON = 12
ADAPTIVE = "adaptive"


def attach(words: str, trainer: Trainer, batches: BatchSource, steps: int) -> brevact.MixSchedule | None:
    """Gives a model its policy, or the model and its loss the one that is fitted to both.

    Args:
        words: see the top of this file.
        trainer: of a new model.
        batches: for training; the first ones are what a policy is fitted on.
        steps: optimizer steps of the run.

    Returns:
        What changes the probability of a mixture, for each step; None where nothing does.

    Raises:
        RecipeError: there is no such policy, or it is not possible for this model.
    """
    policy, _, change = words.partition("@")
    kind, _, rest = change.partition(":")
    try:
        found = policy_or_fit(policy)
        if isinstance(found, FittedPolicy):
            chosen = list(itertools.islice(batches.epoch(), FITTED_ON))
            found.named(trainer.objective, chosen, loss_of).apply(trainer.objective)
        else:
            found.apply(trainer.model)
        if kind == ADAPTIVE:
            trainer.adapt(next(batches.epoch()), int(rest))
        elif kind:
            start, end = map(float, rest.split(":"))
            return brevact.MixSchedule(trainer.model, kind, start=start, end=end, steps=steps)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise RecipeError(f"policy {words}: {error}") from error
    return None


def loss_of(objective: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    """The loss of an `Objective`."""
    return objective(*batch)[1]
