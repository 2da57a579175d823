"""Policies as text, as a command line or a configuration file holds them: `parse_policy`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from brevact.bit_widths.fit import fit
from brevact.policy.attach import quantize_backward
from brevact.policy.text import PolicyText, read_policy
from brevact.quantizers.brief import brief
from brevact.reports.gradient_passes import Loss

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class PolicySpec(PolicyText):
    """A policy as text: the policy, or the budget that it is to be fitted to.

    >>> import torch, brevact
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
    >>> loss = lambda model, batch: model(batch).square().mean()
    >>> spec = brevact.parse_policy("8x")
    >>> spec.needs_fit, spec.budget
    (True, {'ratio': 8.0})
    >>> policy = spec.policy_for(model, [torch.randn(128, 64) for _ in range(3)], loss)
    >>> model = brevact.quantize_backward(model, policy)

    Args:
        text: the text itself.
        source: policy for ``brevact.quantize_backward``; None if a budget is to be fitted.
        budget: keyword arguments of ``brevact.fit``; empty if nothing is to be fitted.
    """

    @property
    def needs_fit(self) -> bool:
        """Whether batches and a loss are needed to make the policy."""
        return bool(self.budget)

    def policy_for(
        self,
        model: nn.Module,
        batches: Sequence[Any] = (),
        loss: Loss | None = None,
        *,
        quick: bool = False,
        progress: bool = False,
    ) -> Any:
        """Return the policy for ``brevact.quantize_backward`` of a model; a budget is fitted, as ``brevact.fit`` does.

        Args:
            model: module without a policy; it stays as it is.
            batches: at least 2, for a budget.
            loss: takes the model and a batch, and returns a scalar; for a budget.
            quick: as of ``brevact.fit``.
            progress: whether a bar appears where it takes long.

        Raises:
            TypeError: batches, loss or ``quick`` are of another type.
            ValueError: there are no batches or no loss, and a budget needs them; or the budget is impossible.
        """
        if not self.needs_fit:
            return self.source
        if loss is None or (isinstance(batches, list | tuple) and not batches):
            raise ValueError(
                f"loss={brief(loss)}, batches={brief(batches)}: policy {self.text!r} is a budget, which is fitted on "
                "batches; accepted are at least 2 of them, and a loss: policy_for(model, batches, loss)"
            )
        return fit(model, batches, loss, **self.budget, quick=quick, progress=progress)  # type: ignore[arg-type]

    def attach(self, model: M, batches: Sequence[Any] = (), loss: Loss | None = None) -> M:
        """Give a model the policy, in place, and return it; arguments and errors are those of :meth:`policy_for`."""
        return quantize_backward(model, self.policy_for(model, batches, loss))


def parse_policy(text: str | os.PathLike[str]) -> PolicySpec:
    """Return the policy, or the budget, that a text names; neither the text nor a file that it names can run code.

    >>> import brevact
    >>> brevact.parse_policy("default").source is brevact.DEFAULT
    True
    >>> spec = brevact.parse_policy("StochBackward4bit:bucket_size=256")
    >>> brevact.quantizer(spec.source).bucket_size
    256
    >>> brevact.parse_policy("512MiB").budget, brevact.parse_policy("noise=0.05").budget
    ({'saved_bytes': 536870912}, {'noise': 0.05})

    Args:
        text: one of the following.

            - A policy: "default", "recompute", "conv_net", "transformer", or "none" for full precision.
            - A backward quantizer by name, with settings after a colon.
            - A budget: "24x" (times fewer bytes than full precision), "512MiB" (B, KiB, MiB, GiB), "peak=2GiB" (of a
              step), "noise=0.05" (in units of the noise between minibatches), or several of these and the time of a
              step, "60x noise=0.002 time=1.15".
            - The path of a file that ``Policy.save`` wrote, ending in ".json".

    Returns:
        The policy, or the budget that a policy is to be fitted to.

    Raises:
        OSError: the file cannot be read.
        TypeError: ``text`` is neither text nor a path.
        ValueError: ``text`` is none of these, or a setting is unknown or out of range.
    """
    source, budget = read_policy(text)
    return PolicySpec(os.fsdecode(text).strip(), source, budget)
