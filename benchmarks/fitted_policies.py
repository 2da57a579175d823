"""Policies that `brevact.fit` makes for a model, as words of a command line.

fit:24x                      24 times less than full precision
fit:2.5MiB                   bytes
fit:bytes=StochBackward3bit  the bytes of a policy that `policy_names` reads
fit:noise=0.05               noise, in units of minibatch noise
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

import brevact
from benchmarks.policy_names import NamedPolicy, named_policy
from recipes.budgets import budget_of
from recipes.errors import RecipeError

M = TypeVar("M", bound=nn.Module)
#: What their names begin with.
FIT = "fit:"
_BYTES, _NOISE = "bytes=", "noise="


@dataclass(frozen=True)
class FittedPolicy:
    """A policy that is still to be made, for a model.

    Args:
        name: as the command line has it.
        budget: a keyword argument of `brevact.fit`; empty for the bytes of another policy.
        like: the other policy, or None.
    """

    name: str
    budget: dict[str, Any]
    like: NamedPolicy | None = None

    def named(self, model: nn.Module, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor]) -> NamedPolicy:
        """The policy for a model.

        Args:
            model: that returns a loss.
            batches: keyword arguments of the model, for the fit; the first one for bytes.
            loss: of the model and a batch.
        """
        budget = self.budget
        if self.like is not None:
            report = brevact.memory_report(self.like.apply(copy.deepcopy(model)), batches[0])
            budget = {"saved_bytes": report.saved_bytes}
        return NamedPolicy(self.name, brevact.fit(model, batches, loss, **budget, progress=False))


def policy_or_fit(words: str) -> NamedPolicy | FittedPolicy:
    """Read a policy, or what one is fitted to; for argparse.

    Args:
        words: see the top of this file, and of `policy_names`.

    Raises:
        argparse.ArgumentTypeError: there is no such policy, or no such budget.
    """
    if not words.startswith(FIT):
        return named_policy(words)
    budget = words.removeprefix(FIT)
    try:
        if budget.startswith(_BYTES):
            return FittedPolicy(words, {}, named_policy(budget.removeprefix(_BYTES)))
        if budget.startswith(_NOISE):
            return FittedPolicy(words, {"noise": float(budget.removeprefix(_NOISE))})
        return FittedPolicy(words, budget_of(budget, "fit:"))
    except (ValueError, RecipeError) as error:
        raise argparse.ArgumentTypeError(f"{words}: {error}") from error
