"""Attach a run's policy to its model, track its owner, and remove it."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from brevact.autograd import has_region
from brevact.bit_widths.spec import PolicySpec
from brevact.policy.attach import quantize_backward, restore_backward
from brevact.policy.presets import Policy
from brevact.policy.rules import has_policy
from brevact.reports.gradient_passes import Loss
from brevact.trainers.arguments import refuse_to_fit
from brevact.trainers.batches import device_of
from brevact.trainers.processes import in_one_process

_log = logging.getLogger(__name__)
#: Owner of each model's policy.
_OWNERS: weakref.WeakKeyDictionary[nn.Module, AttachedPolicy] = weakref.WeakKeyDictionary()


class AttachedPolicy:
    """A policy that one run at a time attaches to a model; without a spec, the model's own policy."""

    def __init__(self, spec: PolicySpec | None, *, quick_fit: bool = True) -> None:
        self.spec, self._quick_fit = spec, quick_fit
        #: The policy fitted to a budget; None without a budget.
        self.fitted: Policy | None = None
        self._model: weakref.ref[nn.Module] | None = None  # an owner keeps no model alive
        self._is_ours = False

    def take(self, model: nn.Module) -> None:
        """Claim a model for a run; raises a ValueError if another run has it."""
        owner = _OWNERS.get(model)
        if owner is not None and owner is not self and (owner.spec is None or has_policy(model)):
            raise ValueError(
                "model: another training policy is at work on it; a trainer takes one callback of brevact: remove the "
                "other, or, after a run that was interrupted, call its end()"
            )
        _OWNERS[model] = self
        self._model = weakref.ref(model)

    def attach(self, batches: Sequence[Any], loss: Loss | None, rules: str | None = None) -> None:
        """Attach the policy to the model, replacing one that this object attached before.

        Rank 0 fits a budget on batches and a loss, unless `rules` is the JSON of a fitted policy. Raises a ValueError
        if the model lacks the policy that it should keep, has one already, or :func:`brevact.fit` fails.
        """
        assert self._model is not None
        model = self._model()
        assert model is not None
        if self.spec is None:
            if not (has_policy(model) or any(map(has_region, model.modules()))):
                raise ValueError(
                    "policy=None is the policy that the model has, and it has none; give it one, or pass a text, such "
                    'as "default"'
                )
            return
        if self._is_ours and has_policy(model):
            restore_backward(model)
        policy, self.fitted = self.spec.source, None
        if self.spec.needs_fit:
            refuse_to_fit(model)
            if rules is None:
                make = self.spec.policy_for
                _log.info("the policy %s is fitted to batches of the run, layer by layer", self.spec.text)
                fitted = functools.partial(make, model, batches, loss, quick=self._quick_fit, progress=True)
                rules = in_one_process(lambda: fitted().to_json(), device_of(model))
            policy = self.fitted = Policy.from_json(rules)
        quantize_backward(model, policy)
        self._is_ours = True

    def release(self) -> None:
        """Remove the policy from the model, if this object attached it, and release the model to other runs."""
        model = None if self._model is None else self._model()
        if model is not None and _OWNERS.get(model) is self:  # a copy of this object has no model
            if self._is_ours and has_policy(model):
                restore_backward(model)
            del _OWNERS[model]
        self._model, self._is_ours = None, False
