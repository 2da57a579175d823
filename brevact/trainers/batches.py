"""The first batches of a loader, without a trace in the run that follows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from brevact.autograd.seeds import kept_generators


@contextmanager
def kept_random_state(loader: Any = None) -> Iterator[None]:
    """Give random generators back the states that they had: those of Python, NumPy and torch, and a loader's own."""
    generators = [*_generators_of(loader)]
    states = [generator.get_state() for generator in generators]
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    with kept_generators():
        try:
            yield
        finally:
            random.setstate(of_python)
            numpy.random.set_state(of_numpy)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


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
    """Return so many batches, at most, that a loader begins with; the next iteration over it is not changed.

    The loader may be one that Accelerate has prepared, or a list of batches.
    """
    # A prepared loader counts its passes for gradient accumulation: the one inside does not.
    plain = getattr(loader, "base_dataloader", loader)
    with kept_random_state(loader):
        iterator = iter(plain)
        found = list(itertools.islice(iterator, count))
        del iterator  # ends its workers
    return found


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple | list):
        found = [moved(each, device) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU where there is none."""
    return next((x.device for x in model.parameters()), torch.device("cpu"))
