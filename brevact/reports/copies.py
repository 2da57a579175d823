"""Copies of models, with their regions, that are measured in place of the models."""

from __future__ import annotations

import copy
import pickle
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from brevact.autograd import attach_region, has_region
from brevact.autograd.hooks import regions_of

M = TypeVar("M", bound=nn.Module)


def copy_of(model: M) -> M:
    """Return a copy of a model, its regions included, without gradients and hooks of parameters.

    A model that cannot be copied raises a ValueError.
    """
    if any(is_lazy(x) for x in (*model.parameters(), *model.buffers())):
        raise ValueError("model: some lazy modules have no parameters yet; call the model on a batch first")
    try:
        with torch.inference_mode(False):  # or its parameters could not train
            copied = copy.deepcopy(model)
    except RuntimeError as error:
        raise ValueError(
            f"model: {type(model).__name__} cannot be copied ({error}). The legacy weight_norm and spectral_norm keep "
            "a computed tensor: use those of torch.nn.utils.parametrizations, or measure before the first forward pass"
        ) from error
    except (TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"model: {type(model).__name__} cannot be copied ({error}), because it holds what is no part of a model: a "
            "lock, a file, a process group; measure the module that it wraps (model.module), or take that out first"
        ) from error
    modules = dict(copied.named_modules())
    for name, module in model.named_modules():
        for hook in regions_of(module):
            if name in modules and not has_region(modules[name], hook.origin):  # a torch.fx.GraphModule drops hooks
                attach_region(modules[name], hook.settings, hook.origin, label=hook.label)
    return copied


def uncompiled() -> AbstractContextManager[Any]:
    """A context in which compiled modules and functions run as they are written: no hook sees inside a graph."""
    is_there = "torch._dynamo" in sys.modules  # without it nothing is compiled, and importing it takes seconds
    return torch.compiler.set_stance("force_eager") if is_there else nullcontext()
