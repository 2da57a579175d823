"""Sensitivities of layer groups, from the distance of gradients that differ in one group's random bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from brevact.arguments import check_count, check_state
from brevact.bit_widths.layers import Plan
from brevact.quantizers.brief import brief
from brevact.reports.gradient_passes import Loss, as_it_was, gradients, squared_distance
from brevact.reports.in_place import in_place


def sensitivities(plan: Plan, widths: Sequence[int], batch: Any, loss: Loss, step: int) -> list[float]:
    """Measure each group's sensitivity, averaged over ranks: half a squared distance times (2^b - 1)^2.

    In squared units of the gradient; the training step gives the seeds. The model is unchanged, with `widths` set.
    """
    model, found = plan.layers.model, []
    try:
        with in_place(model), as_it_was(model):
            first = gradients(model, batch, loss, step, step)
            for group, width in zip(plan.groups, widths, strict=True):
                plan.set(widths, redrawn=group.sources)
                variance = squared_distance(gradients(model, batch, loss, step, step), first) / 2
                found.append(variance / expected_noise(1.0, width))
    finally:
        plan.set(widths)
    if is_distributed():
        shared = torch.tensor(found, dtype=torch.float32, device=next(model.parameters()).device)
        distributed.all_reduce(shared)
        found = (shared / distributed.get_world_size()).tolist()
    return found


def expected_noise(sensitivity: float, bit_width: int) -> float:
    return sensitivity / (2**bit_width - 1) ** 2


def is_distributed() -> bool:
    """Return whether a process group is initialized."""
    return distributed.is_available() and distributed.is_initialized()


def check_groups(state: Any, own: Mapping[str, Any]) -> None:
    """Raise a TypeError or a ValueError if a state has other groups or another number of samples."""
    check_state(state, own)
    if state["layers"] != own["layers"]:
        raise ValueError(
            f"state: its layers are {brief(state['layers'])}, those of this model {brief(own['layers'])}; make the "
            "object with the model, the policy and a batch of the size of the checkpoint's run"
        )
    for name in ("bit_widths", "sensitivities"):
        if len(state[name]) != len(own[name]):
            raise ValueError(f"state: got {len(state[name])} {name}; accepted are {len(own[name])}, one a group")
    check_count("state: steps", state["steps"], 0)
    for name, kinds, accepted in (("bit_widths", int, "integers"), ("sensitivities", (int, float), "finite numbers")):
        for value in state[name]:
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
                raise ValueError(f"state: {name} has {brief(value)}; accepted are {accepted} of at least 0")
    counts = [None if each is None else len(each) for each in (state["samples"], own["samples"])]
    if counts[0] != counts[1]:
        raise ValueError(f"state: samples={counts[0]}; accepted is {counts[1]}, with which this object was made")
