"""Policies as text, for command lines and configuration files: `parse_policy`."""

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
from brevact.reports.gradient_noise import Loss

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class PolicySpec(PolicyText):
    """A policy from text: the policy itself, or a budget to fit it to.

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
        source: policy for ``brevact.quantize_backward``; None for a budget.
        budget: keyword arguments of ``brevact.fit``; empty for a policy.
    """

    @property
    def needs_fit(self) -> bool:
        """Whether the policy must be fitted, with batches and a loss."""
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
        """Return the policy for ``brevact.quantize_backward``; fits a budget by ``brevact.fit``.

        Args:
            model: module without a policy, unchanged.
            batches: at least 2, for a budget.
            loss: takes the model and a batch, and returns a scalar; for a budget.
            quick: as in ``brevact.fit``.
            progress: whether to show a progress bar after some seconds.

        Raises:
            TypeError: ``batches``, ``loss`` or ``quick`` has the wrong type.
            ValueError: a budget lacks batches or a loss, or is impossible.
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
        """Attach the policy to the model, in place, and return it; arguments and errors as in :meth:`policy_for`."""
        return quantize_backward(model, self.policy_for(model, batches, loss))


def parse_policy(text: str | os.PathLike[str]) -> PolicySpec:
    """Parse the text of a policy or a budget; neither the text nor a file that it names can run code.

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
            - A budget: "24x" (times fewer bytes), "512MiB" (B, KiB, MiB, GiB), "noise=0.05" (in minibatch noise), or
              two of these and the time of a step, "60x noise=0.002 time=1.15".
            - The path of a file that ``Policy.save`` wrote, ending in ".json".

    Returns:
        The policy, or the budget to fit it to.

    Raises:
        OSError: the file cannot be read.
        TypeError: ``text`` is neither text nor a path.
        ValueError: ``text`` is none of these, or a setting is unknown or out of range.
    """
    source, budget = read_policy(text)
    return PolicySpec(os.fsdecode(text).strip(), source, budget)
