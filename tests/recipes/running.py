"""Interrupt runs of recipes, and compare their files."""

import itertools
from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from recipes.files import read_checkpoint, read_rows

PNG = b"\x89PNG\r\n\x1a\n"


@contextmanager
def interrupted_at_forward(kind, number):
    """Raises KeyboardInterrupt where the forward pass of a model of that kind starts for the `number`-th time."""
    count = itertools.count(1)

    def stop(module, inputs):
        if isinstance(module, kind) and next(count) == number:
            raise KeyboardInterrupt

    handle = register_module_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def interrupted_without_hooks(kind, number):
    """The same of a class with a forward of its own: a hook on all modules would have Brevitas' own quantizers run."""
    count, forward = itertools.count(1), kind.forward

    def stop(module, *inputs):
        if next(count) == number:
            raise KeyboardInterrupt
        return forward(module, *inputs)

    kind.forward = stop
    try:
        yield
    finally:
        kind.forward = forward


def same_weights(one, other):
    first, second = (read_checkpoint(folder / "checkpoint.pt")["trainer"]["model"] for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def results_without_time(folder):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_rows(folder / "history.csv")]
