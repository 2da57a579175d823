"""Program transforms in which nothing is packed, or which cannot run a region at all.

* ``torch.func.grad``, ``vjp``, ``jacrev``, ``hessian`` allow no saved-tensor hooks: entering a region raises. If one is
  called inside a region, the region steps aside (:func:`_step_aside`): the transformed function saves unpacked tensors.
* ``torch.func.vmap``, ``jvp``, forward-mode AD: saved tensors have batch dimensions or tangents that codes would lose.
  They stay unpacked: results are those of the model without backward quantization.
* ``torch.jit.trace``: a traced program has no regions, like ``torch.export``'s; it saves torch's tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd import forward_ad

from brevact.autograd.abandoned_forwards import current_region
from brevact.autograd.first_region import before_first_region
from brevact.private_names.of_torch import contexts_in_graphs, functorch_interpreter, states_of_modules
from brevact.private_names.of_torch import is_jit_tracing as is_tracing

NO_TRANSFORMS = (
    "torch.func.grad, vjp, jacrev and hessian do not support saved tensor hooks, by which a model with backward "
    "quantization stores packed activations. Differentiate by torch.autograd.grad, put the model in eval mode "
    "(model.eval()), where it packs nothing, or call brevact.restore_backward(model) first. "
    "torch.autograd.graph.disable_saved_tensors_hooks forbids these hooks, too: leave it"
)
NO_ROUNDED_NORMS = (
    "quantize_forward: norms go on with rounded values neither under torch.func transforms and forward-mode AD nor in "
    "torch.jit.trace. Use torch.export.export to make a program of the model, or call brevact.restore_backward(model) "
    "first, which changes what the model computes"
)


def is_distributed() -> bool:
    """Return whether several processes train a model, each perhaps with a part of its parameters."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def may_free_weights(weight: torch.Tensor) -> bool:
    """Return whether a weight's memory may be freed between the forward and the backward pass, as FSDP does."""
    return is_distributed() and (type(weight) is not torch.nn.Parameter or bool(states_of_modules))


def is_transformed() -> bool:
    """Return whether a ``torch.func`` transform or forward-mode AD is active."""
    return forward_ad._current_level >= 0 or functorch_interpreter() is not None


def check_rounding() -> None:
    if is_transformed() or is_tracing():
        raise NotImplementedError(NO_ROUNDED_NORMS)


def _step_aside() -> None:
    """Make ``disable_saved_tensors_hooks``, which transforms enter, suspend the region's hooks."""
    disable = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    @functools.wraps(disable)
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        region = current_region()
        is_on = region is not None and not region.hooks.is_empty and region.hooks.are_innermost()
        with region.hooks.suspended if is_on else nullcontext(), disable(error_message):
            yield

    torch.autograd.graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks
    contexts_in_graphs[disable_saved_tensors_hooks] = None


before_first_region(_step_aside)
