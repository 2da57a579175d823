"""Peaks of the bytes that PyTorch allocates in a step, above those at its start; tensors saved in the host's memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from brevact.autograd import running
from brevact.private_names.of_profiler import allocations, quietly


def saved_on_host(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which autograd's tensors of a model on a GPU wait for backward in the host's memory."""
    if all(x.is_cpu for x in model.parameters()):
        return nullcontext()
    return running.measuring_hooks(lambda x: (x.device, x.detach().cpu()), lambda saved: saved[1].to(saved[0]))


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    step()  # warm up compiled kernels and cached constants
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with quietly(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    return max(itertools.accumulate(allocations(profile)), default=0)
