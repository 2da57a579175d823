"""The region as handlers see it: it says which tensors are activations, and saves tensors for backward."""

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
    """Hooks that run torch's own layers, whose gradients are those of our Functions, and pack the tensors they save."""

    pair: tuple[Callable[..., Any], Callable[..., Any]]
    """The hooks that pack and unpack."""

    suspended: AbstractContextManager[None]
    """Context without the hooks, which must be the innermost ones where it is entered."""

    scope: Any
    """The checkpoint in which the region runs; None: in none."""

    def are_in_checkpoint(self) -> bool:
        """Return whether a non-reentrant checkpoint is around the region, in forward or again."""
        ...

    def run_torch(
        self, layer: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Any, flattens: bool = False
    ) -> Tensor:
        """Run a layer that saves its input, whose leading dimensions it ``flattens``, and its weight, and keep both."""
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

        If it ``offers`` that, it is given up where another op keeps the tensor as it is. In place of ``kept``, ``keep``
        packs the tensor, or ``mask_of`` makes a mask of it, which stands for the tensor until another op packs that.
        Without any of them the hooks decide, as for a function that saves nothing.
        """
        ...

    def may_give_up_masks(self) -> bool:
        """Return whether hooks around the region, if there are some, are a report's, which can be told."""
        ...

    def run_torch_norm(self, norm: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Run a norm by ``norm.forward``, and keep its normalized input; return the output."""
        ...


class Keeper(Protocol):
    """A region as handlers see it: the eager one (``regions``), or one call in a traced graph (``compiled.nodes``)."""

    settings: Any
    """The ``BackwardSettings``: never None where a handler runs."""

    recompute: int
    """Multiplications and additions that an element of a layer may cost to be recomputed for any reader."""

    mode: AbstractContextManager[Any]
    """Hands the torch functions that run in it to their handlers."""

    def is_activation(self, x: Any) -> bool:
        """Return whether ``x`` is a tensor that a Function of ours can pack."""
        ...

    def packs_layer_input(self, x: Any) -> bool:
        """Return whether the input of a layer with weights can be packed: an activation by its place."""
        ...

    def packs_layer(self, input: Any, weight: Any, bias: Tensor | None = None) -> bool:
        """Return whether the input of a layer with this weight can be packed, and one of these needs a gradient."""
        ...

    def packs_input(self, x: Any) -> bool:
        """Return whether the input of a function can be packed: floating point and no weight."""
        ...

    def is_weight(self, x: Tensor) -> bool:
        """Return whether ``x`` is a weight of the model that runs in the region."""
        ...

    def are_weights(self, *tensors: Tensor) -> bool:
        """Return whether tensors are weights."""
        ...

    def torch_runner(self, *tensors: Tensor | None) -> TorchRunner | None:
        """Return the hooks that run torch's own layer, which saves these tensors; None where a Function must run."""
        ...

    def apply(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Apply one of our Functions, whose saved tensors are packed already."""
        ...

    def keep(self, x: Tensor, *, share: bool = True, norm: NormInput | None = None) -> Saved:
        """Save a floating-point activation as the settings say; of a norm's input, the normalized values."""
        ...

    def keep_levels(self, x: Tensor, norm: NormInput) -> Saved:
        """Keep the input of a norm by a quantizer that has a form for normalized values."""
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
        """Keep an operand that may be a weight: packed if it is an activation, as it is otherwise."""
        ...

    def keep_weight(self, x: Tensor) -> Saved:
        """Keep a weight."""
        ...


class EagerKeeper(Keeper, Protocol):
    """A region that runs without a compiler, as saved-tensor hooks and fake quantization see it."""

    seeds: SeedStream
    packs: bool
    op: str | None
    """The op with settings of its own for which the region is; None: for any."""
    has_rules_for_other_code: bool
    """Whether some of these are for code that no mode sees."""
    hooks: TorchRunner
    is_alone: bool
    """Whether no hooks are around the region, which would see each tensor that it keeps."""
    is_distributed: bool
    """Whether processes share the model."""
    is_counted: bool
    """Whether a mode in a checkpoint counts ops (a selective one): those of packing, which may be packed already when
    the forward runs and not when it is recomputed, are none of them."""

    by_op: dict[str, Any]
    """Settings that some ops have in place of ``settings``, by the names of the ops."""

    def share_normalized(self, x: Tensor, norm: Hashable, vectors: tuple[Tensor, ...], decoder: Any) -> None:
        """Let ops find the normalized values of ``x`` in tensors that have been made to keep them."""
        ...

    def mark(self, result: Any, *, is_weight: bool) -> None:
        """Note whether a function's result is a weight or an activation."""
        ...

    def packs_for(self, saver: FrameType) -> bool:
        """Return whether tensors that autograd saves below a frame are packed."""
        ...

    def keeper_of(self, name: str) -> EagerKeeper:
        """Return the region that packs the tensors of code that no mode sees, by a rule for that code."""
        ...

    def apply_to_weight(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Apply one of our Functions that returns a weight, and note that it does."""
        ...


def with_settings(region: Keeper, settings: BackwardSettings) -> Keeper:
    """Return a region as it is, but for its settings, for one op."""
    other = copy.copy(region)
    other.settings = settings
    return other
