"""Take a loader's first batches without side effects on the run, and share a text between its processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from brevact.policy.attach import region_of_step
from brevact.reports.in_place import kept_random_state


def _generators_of(loader: Any) -> Iterator[torch.Generator]:
    holders, found = [loader], set()
    while holders:
        holder = holders.pop()
        if holder is None or id(holder) in found:
            continue
        found.add(id(holder))
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and id(generator) not in found:
            found.add(id(generator))
            yield generator
        holders += [getattr(holder, name, None) for name in ("base_dataloader", "batch_sampler", "sampler")]


def first_batches(loader: Iterable[Any], count: int) -> list[Any]:
    """Return at most `count` first batches of a loader (Accelerate's, too) or list; later iterations are unchanged."""
    # Accelerate's prepared loader counts its passes for gradient accumulation: the inner one does not.
    plain = getattr(loader, "base_dataloader", loader)
    states = [(generator, generator.get_state()) for generator in _generators_of(loader)]
    try:
        with kept_random_state():
            iterator = iter(plain)
            found = list(itertools.islice(iterator, count))
            del iterator  # ends its workers
    finally:
        for generator, state in states:
            generator.set_state(state)
    return found


def moved(value: Any, device: torch.device) -> Any:
    """Move a batch's tensors to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple | list):
        found = [moved(each, device) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or the CPU."""
    return next((x.device for x in model.parameters()), torch.device("cpu"))


def has_others() -> bool:
    """Return whether there are other processes in this run."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def in_one_process(make: Callable[[], str], device: torch.device) -> str:
    """Return rank 0's result on all ranks, sent through `device`; its error raises a RuntimeError on the others."""
    if not has_others():
        return make()
    found: list[str | None] = [None]
    error = None
    if distributed.get_rank() == 0:
        try:
            found = [make()]
        except Exception as failure:  # raised after the broadcast, for which the others wait
            error = failure
    distributed.broadcast_object_list(found, src=0, device=device)
    if error is not None:
        raise error
    if found[0] is None:
        raise RuntimeError("the policy could not be fitted in the process of rank 0; its error says why")
    return found[0]


def in_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of a model in the model's region, which hooks enter only for `forward`."""

    @functools.wraps(function)
    def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with region_of_step(model):
            return function(model, *args, **kwargs)

    return run
