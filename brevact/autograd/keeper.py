"""Handlers' interface to the region: it identifies activations, and saves tensors for backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from brevact.autograd.normalizing import NormInput
from brevact.autograd.saved import Saved
from brevact.autograd.seeds import SeedStream
from brevact.autograd.settings import BackwardSettings


class TorchRunner(Protocol):
    """Hooks that run torch's own layers, with our Functions' gradients, and pack the tensors that these save."""

    pair: tuple[Callable[..., Any], Callable[..., Any]]
    """The hooks that pack and unpack."""

    suspended: AbstractContextManager[None]
    """Context without the hooks, which must be innermost on entry."""

    scope: Any
    """The checkpoint that the region runs in, or None."""

    def are_in_checkpoint(self) -> bool:
        """Return whether a non-reentrant checkpoint is around the region, in forward or recomputation."""
        ...

    def run_torch(
        self, layer: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Any, flattens: bool = False
    ) -> Tensor:
        """Run a layer that saves its weight and its input (``flattens``: with leading dimensions merged); save both."""
        ...

    def run_torch_function(
        self,
        function: Callable[[Tensor], Tensor],
        input: Tensor,
        *,
        kept: Saved | None = None,
        keep: Callable[[Tensor], Saved] | None = None,
        mask_of: Callable[[Tensor], Tensor] | None = None,
        offers: bool = False,
    ) -> Tensor:
        """Run a function that saves its input or its output, and save ``kept`` in place of that tensor.

        Instead of ``kept``, ``keep`` packs the tensor, or ``mask_of`` makes a mask that replaces it until another op
        packs it. Without any of them the hooks decide, as for a function that saves nothing. ``offers``: drop the saved
        form if another op saves the tensor unpacked.
        """
        ...

    def may_give_up_masks(self) -> bool:
        """Return whether the only hooks around the region, if any, are a report's, which can be notified."""
        ...

    def run_torch_norm(self, norm: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Run a norm by ``norm.forward``, save its normalized input, and return its output."""
        ...


class Keeper(Protocol):
    """Handlers' view of a region: an eager one (``regions``), or one call in a traced graph (``compiled.nodes``)."""

    settings: Any
    """The ``BackwardSettings``: never None where a handler runs."""

    recompute: int
    """Maximum multiplications and additions per element of a layer that is recomputed for any reader."""

    mode: AbstractContextManager[Any]
    """Dispatches torch functions inside it to their handlers."""

    def is_activation(self, x: Any) -> bool:
        """Return whether ``x`` is a tensor that our Functions can pack."""
        ...

    def packs_layer_input(self, x: Any) -> bool:
        """Return whether a weighted layer's input can be packed: its position makes it an activation."""
        ...

    def packs_layer(self, input: Any, weight: Any, bias: Tensor | None = None) -> bool:
        """Return whether the input of a layer with this weight can be packed, and any of the three needs a gradient."""
        ...

    def packs_input(self, x: Any) -> bool:
        """Return whether a function's input can be packed: floating point and not a weight."""
        ...

    def is_weight(self, x: Tensor) -> bool:
        """Return whether ``x`` is a weight of the region's model."""
        ...

    def are_weights(self, *tensors: Tensor) -> bool: ...

    def torch_runner(self, *tensors: Tensor | None) -> TorchRunner | None:
        """Return the hooks that run torch's own layer, which saves these tensors; None if a Function must run."""
        ...

    def apply(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Apply one of our Functions, whose saved tensors are already packed."""
        ...

    def keep(self, x: Tensor, *, share: bool = True, norm: NormInput | None = None) -> Saved:
        """Save a floating-point activation according to the settings; for a norm's input, its normalized values."""
        ...

    def keep_levels(self, x: Tensor, norm: NormInput) -> Saved:
        """Save a norm's input by a quantizer that has a form for normalized values."""
        ...

    def find_known(self, x: Tensor) -> Saved | None:
        """Return the registered saved form of ``x``, if its quality is at least that of the region's own quantizer."""
        ...

    def find_kept(self, x: Tensor) -> Saved | None:
        """Return the registered saved form of ``x``, or the packed one that an earlier op saved."""
        ...

    def register(self, out: Tensor, kept: Saved, *, is_dirty: bool = False, is_new: bool = False) -> None:
        """Register the saved form of ``out``, which ops that save ``out`` use.

        ``is_dirty``: an in-place Function modified ``out`` and will call ``mark_dirty``, which bumps its version once
        more. ``is_new``: ``out`` is dense, in memory of its own.
        """
        ...

    def keep_activation(self, x: Tensor) -> Saved:
        """Save an operand that may be a weight: packed if it is an activation, unpacked otherwise."""
        ...

    def keep_weight(self, x: Tensor) -> Saved:
        """Save a weight."""
        ...


class EagerKeeper(Keeper, Protocol):
    """Saved-tensor hooks' and fake quantization's view of a region that runs without a compiler."""

    seeds: SeedStream
    packs: bool
    op: str | None
    """The op that the region is for, which has its own settings; None: any op."""
    has_rules_for_other_code: bool
    """Whether some of ``by_op`` are for code that no mode sees."""
    hooks: TorchRunner
    is_alone: bool
    """Whether no hooks around the region see the tensors that it saves."""
    is_distributed: bool
    """Whether processes share the model."""
    is_counted: bool
    """Whether a selective checkpoint's mode counts ops. It must not count those of packing: a tensor may be packed
    already in forward, and not in recomputation."""

    by_op: dict[str, Any]
    """Settings that override ``settings`` for some ops, by op name."""

    def share_normalized(self, x: Tensor, norm: Hashable, vectors: tuple[Tensor, ...], decoder: Any) -> None:
        """Let ops find the normalized values of ``x`` in tensors that were made to save them."""
        ...

    def mark(self, result: Any, *, is_weight: bool) -> None:
        """Record whether a function's result is a weight or an activation."""
        ...

    def packs_for(self, saver: FrameType) -> bool:
        """Return whether tensors that autograd saves below this frame are packed."""
        ...

    def keeper_of(self, name: str) -> EagerKeeper:
        """Return the region that packs tensors of code that no mode sees, by that code's rule."""
        ...

    def apply_to_weight(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Apply one of our Functions, and record that its result is a weight."""
        ...


def with_settings(region: Keeper, settings: BackwardSettings) -> Keeper:
    """Return a copy of a region with other settings, for one op."""
    other = copy.copy(region)
    other.settings = settings
    return other
