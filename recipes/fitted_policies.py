"""Policies that `brevact.fit` makes for a model, and widths that `brevact.Adaptive` gives it, as words to type.

fit:24x                      24 times less than full precision
fit:2.5MiB                   bytes
fit:peak=2GiB                the peak of a step, in bytes
fit:bytes=StochBackward3bit  the bytes of a policy that `policy_names` reads
fit:noise=0.05               noise, in units of minibatch noise
adaptive:24x                 what `brevact.Adaptive` does in a few steps, from `DEFAULT`; no budget of noise
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

import brevact
from recipes.budgets import budget_of
from recipes.errors import RecipeError
from recipes.policy_names import NamedPolicy, named_policy

M = TypeVar("M", bound=nn.Module)
#: What their names begin with.
FIT, ADAPTIVE = "fit:", "adaptive:"
_BYTES, _NOISE = "bytes=", "noise="
#: Measurements of `brevact.Adaptive`, of which the last ones count most.
_STEPS = 4


class AdaptedWidths(NamedTuple):
    """What `brevact.Adaptive` gives a model in a few steps, where a policy may stand.

    Args:
        name: as the command line has it.
        budget: a keyword argument of `brevact.Adaptive`.
        batches: that it measures.
        loss: of a model and a batch.
    """

    name: str
    budget: dict[str, Any]
    batches: Sequence[Any]
    loss: Callable[[Any, Any], Tensor]
    source = "brevact.Adaptive"

    def apply(self, model: M) -> M:
        """Quantize a model, let widths adapt, and return it."""
        brevact.quantize_backward(model)
        adaptive = brevact.Adaptive(model, self.batches[0], self.loss, **self.budget, every=1)
        for batch in self.batches[1:]:
            adaptive.step(batch)
        return model


@dataclass(frozen=True)
class FittedPolicy:
    """A policy that is still to be made, for a model.

    Args:
        name: as the command line has it.
        budget: a keyword argument of `brevact.fit`; empty for the bytes of another policy.
        like: the other policy, or None.
        adapts: whether `brevact.Adaptive` takes the place of `brevact.fit`.
    """

    name: str
    budget: dict[str, Any]
    like: NamedPolicy | None = None
    adapts: bool = False

    def named(
        self, model: nn.Module, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor]
    ) -> NamedPolicy | AdaptedWidths:
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
        if self.adapts:
            if "saved_bytes" in budget:
                plain = brevact.memory_report(model, batches[0]).plain_bytes
                budget = {"ratio": plain / budget["saved_bytes"]}
            elif "ratio" in budget:
                budget = {"ratio": budget["ratio"]}
            else:
                budget = {"peak_bytes": budget["peak_bytes"]}
            return AdaptedWidths(self.name, budget, batches[:_STEPS], loss)
        return NamedPolicy(self.name, brevact.fit(model, batches, loss, **budget, progress=False))


def policy_or_fit(words: str) -> NamedPolicy | FittedPolicy:
    """Read a policy, or what one is fitted to; for argparse.

    Args:
        words: see the top of this file, and of `policy_names`.

    Raises:
        argparse.ArgumentTypeError: there is no such policy, or no such budget.
    """
    adapts = words.startswith(ADAPTIVE)
    if not (adapts or words.startswith(FIT)):
        return named_policy(words)
    budget = words.removeprefix(ADAPTIVE if adapts else FIT)
    try:
        if budget.startswith(_BYTES):
            return FittedPolicy(words, {}, named_policy(budget.removeprefix(_BYTES)), adapts)
        if budget.startswith(_NOISE) and not adapts:
            return FittedPolicy(words, {"noise": float(budget.removeprefix(_NOISE))})
        return FittedPolicy(words, budget_of(budget, ADAPTIVE if adapts else FIT), None, adapts)
    except (ValueError, RecipeError) as error:
        raise argparse.ArgumentTypeError(f"{words}: {error}") from error
