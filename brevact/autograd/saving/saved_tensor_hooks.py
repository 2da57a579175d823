"""A region's saved-tensor hooks: they pack the tensors that torch's own ops and other code save.

If a region runs torch's own convolution in place of a Function (``run_torch``), the hooks save its input
as the Function would, its weight unpacked. For other ops they pack floating-point activations, save
boolean tensors in one bit per element, and pass everything else through (weights, indices, small tensors).
PyTorch does not check passed-through tensors for in-place changes while hooks are active; the hooks do. Hooks around
the region see each tensor that is really stored.

For double backward, autograd attaches the unpacked tensor to the graph in the saved tensor's place: the second
derivative is torch's own formula on decoded values. The second graph saves decoded tensors as their codes, without
another error. Backward is linear in the incoming gradient, and so the second derivative in the saved gradients: these
are packed if all other tensors that the node saves are known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from brevact.autograd.call_arguments import BoundCall, is_activation, is_complex, is_plain, tensors_of_call
from brevact.autograd.deriving import known_values
from brevact.autograd.deriving.derived import derive, track_weight
from brevact.autograd.interop.library_functions import EXACT, GRADIENT, SCORES, SMOOTH, UNKNOWN
from brevact.autograd.interop.other_code import CHECKPOINT, INPUT_OF_CHECKPOINT, saver_of, saves_input
from brevact.autograd.ops.base import with_bits
from brevact.autograd.region.running import NO_TRANSFORMS
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import (
    AS_IT_IS,
    Blank,
    Decoder,
    Own,
    Region,
    Saved,
    SavedByHook,
    express,
    mapped,
    unpack,
)
from brevact.autograd.saving.stand_ins import give_up, give_up_saturated, hold, offer, stand_in
from brevact.autograd.saving.storages import end_known_values, is_tracked, storage_address
from brevact.autograd.saving.store import INTEGERS, is_compact, keep_exact, keep_mask, keep_places, keep_small, reported
from brevact.autograd.saving.weights import WEIGHT_NUMEL, is_parameter, is_parameter_or_view
from brevact.private_names.of_torch import DisableTorchFunction, current_autograd_node, pop_hooks, push_hooks, top_hooks
from brevact.qat.integer_codes import share_codes

#: Classes of torch.utils.checkpoint whose hooks are active in forward, and in recomputation.
_CHECKPOINT_HOOKS = ("_checkpoint_hook.", "_recomputation_hook.")


def is_checkpoint_innermost() -> bool:
    return _are_of_checkpoint(top_hooks(True))


def _are_of_checkpoint(pair: tuple[Callable, Callable] | None) -> bool:
    return pair is not None and pair[0].__qualname__.startswith(_CHECKPOINT_HOOKS)


def checkpoints_around() -> tuple[Callable, ...]:
    """Return the active non-reentrant checkpoints' pack hooks, outermost first."""
    pairs = []
    while (pair := top_hooks(True)) is not None:
        pairs.append(pair)
        pop_hooks()
    for pair in reversed(pairs):
        push_hooks(*pair)
    return tuple(pair[0] for pair in reversed(pairs) if _are_of_checkpoint(pair))


class _Suspended(AbstractContextManager[None]):
    """Suspends a region's hooks, for tensors of our Functions, and ops whose gradient is singular in theirs."""

    def __init__(self, pair: tuple[Callable, Callable]) -> None:
        self._pair = pair

    def __enter__(self) -> None:
        pop_hooks()

    def __exit__(self, *exc_info: object) -> None:
        push_hooks(*self._pair)


_is_grad_enabled = torch.is_grad_enabled

#: Nodes whose backward saves only gradients, decoded tensors and weights: the second derivative is nonlinear in none.
LINEAR_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Linear", "Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Convolution", "Mul", "Exp"),
        *("Softplus", "Elu", "Gelu", "Hardswish", "Tanh", "Sigmoid", "Softmax", "NativeLayerNorm", "NativeBatchNorm"),
    )
)
#: Nodes whose backward pass consists of products and a sigmoid; the second derivative is quadratic in its result.
CURVED_NODES = frozenset(("SiluBackward0",))


@dataclass(frozen=True, slots=True)
class _Again(Decoder):
    """Decodes an already decoded tensor again: without a loss, whatever the quantizer."""

    decoder: Decoder

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.decoder.decode(tensors)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return self.decoder.described(tensors)


def unpack_attached(stored: SavedByHook | tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor, which autograd attaches to the graph; see :func:`~.saved.unpack`."""
    if isinstance(stored, tuple):
        return unpack(stored)
    if not _is_grad_enabled():
        return stored.decoder.decode(stored.tensors())
    with torch.no_grad():
        tensors = stored.tensors()
        x = stored.decoder.decode(tensors)
    if not any(x is kept for kept in tensors):
        known_values.register(x, tensors, _Again(stored.decoder))
    return x


#: The object that autograd holds for a saved tensor: its saved form, or the unpacked tensor and its version.
_Handle = SavedByHook | tuple[Tensor, int]


class SavedTensorHooks:
    """A region's hooks, in place of those of the region ``around``; without any use for them, it ``is_empty``."""

    def __init__(self, region: Region, around: SavedTensorHooks | None) -> None:
        has_rules = CHECKPOINT in region.by_op or region.has_rules_for_other_code
        self.is_empty = region.settings is None and not has_rules
        is_twice = region.settings is not None and region.settings.double_backward
        self.pair: tuple[Callable, Callable] = self._pack, unpack_attached if is_twice else unpack
        self._around = around
        #: The innermost hooks, unless others are entered inside the region.
        self.innermost: tuple[Callable, Callable] | None = self.pair
        self._replaced: SavedTensorHooks | None = None
        self._outer: tuple[Callable, Callable] | None = None
        #: The pack hook of the checkpoint around the hooks, which identifies it; None without one.
        self.scope: Any = None
        self.suspended: AbstractContextManager[None] = _Suspended(self.pair)
        self._region = region
        # Shapes of the frozen weights of the torch function that the region's mode runs, if its saved tensors may be
        # packed; None otherwise: then other code saves the tensors that the hooks see.
        self.cast_shapes: frozenset[tuple[int, ...]] | None = None
        # Whether the function's gradient reads only the sizes of floating-point tensors.
        self.reads_sizes = False
        # Number of places, if the integers that the function saves are places; 0 if they may be others.
        self.places = 0
        # Whether a backward pass runs whose gradients will be differentiated again.
        self.is_in_backward = False
        # Packs the saved tensors of a torch function that replaces a Function of ours, or makes a weight.
        self._packer: Callable[[Tensor], _Handle] | None = None

    def __enter__(self) -> None:
        around = self._around
        if around is not None and around.are_innermost():
            self._replaced = around
            pop_hooks()
        self._outer = top_hooks(True)
        self.scope = self._outer[0] if self._outer is not None and self.are_in_checkpoint() else None
        if self.is_empty:
            self.innermost = self._outer
            return
        try:
            push_hooks(*self.pair)
        except RuntimeError as error:
            if self._replaced is not None:
                push_hooks(*self._replaced.pair)
            raise NotImplementedError(NO_TRANSFORMS) from error

    def __exit__(self, *exc_info: object) -> None:
        if not self.is_empty:
            pop_hooks()
        if self._replaced is not None:
            push_hooks(*self._replaced.pair)

    def are_innermost(self) -> bool:
        return top_hooks(True) == self.pair

    def are_in_checkpoint(self) -> bool:
        return _are_of_checkpoint(self._outer)

    def pass_on(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether torch may save these itself, and a pointwise function of them: small, not parts of more."""
        region = self._region
        if self._outer is not None or storage_report.recorders or region.recompute or region.settings.double_backward:
            return False
        least, numel, shape = region.settings.min_numel, 1, None
        try:
            for x in tensors:
                if x.shape != shape:
                    numel, shape = numel * x.numel(), x.shape
                    if numel >= least:
                        return False
                storage = x.untyped_storage()
                if storage.__dict__ or storage.nbytes() > 2 * x.nbytes:
                    return False
        except (NotImplementedError, RuntimeError):  # no storage
            return False
        return True

    def run_aside(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        pop_hooks()
        try:
            return func(*args, **kwargs)
        finally:
            push_hooks(*self.pair)

    def _run(self, packer: Callable[[Tensor], _Handle], function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        try:
            self._packer = packer
            return function(*args, **kwargs)
        finally:
            self._packer = None

    def run_torch(
        self, layer: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Any, flattens: bool = False
    ) -> Tensor:
        """Run torch's own layer, whose gradient equals our Function's, and save its input as that would.

        It saves its input and weight, or, if it ``flattens``, the input's rows and the transposed weight. Two hook
        calls for each cost less than a Function.
        """

        is_small = input.numel() < self._region.settings.min_numel
        if is_small and self.pass_on((input,)) and is_parameter(weight) and not is_tracked(weight):
            out: Tensor = self.run_aside(layer, (input, weight, *args), {})
            self._region.mark(out, is_weight=False)
            return out

        def pack(x: Tensor) -> _Handle:
            if x is input:
                return self._hand_on(self._region.keep(x))
            if x is weight or (flattens and x._is_view() and (x._base is weight or x._base is weight._base)):
                return self._pack_weight(x)
            if not flattens:
                return self._pack_of_shape(x, input)
            tensors, decoder = self._region.keep(input)
            if decoder is AS_IT_IS and storage_address(tensors[0]) == storage_address(x):
                return self._hand_on(((x,), AS_IT_IS))
            return self._hand_on(mapped((tensors, decoder), BoundCall(torch.reshape, (Tensor, tuple(x.shape)))))

        return self._run_marked(pack, layer, input, weight, *args)

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
        """Run a torch function that saves its input or its output, and save ``kept`` in place of that tensor.

        If it ``offers``, the unpacked tensor replaces ``kept`` once another op saves it. In place of ``kept``, ``keep``
        packs the tensor, or ``mask_of`` makes its mask, which another op that saves the tensor unpacked replaces.
        """

        def pack(x: Tensor) -> _Handle:
            if kept is None and mask_of is None:
                if x is input:
                    return self._hand_on(self._region.keep(x))
                if keep is None:
                    return self._pack_of_shape(x, input)
            if kept is not None:
                found = kept
            else:
                with self.suspended:
                    found = stand_in(keep_mask(mask_of(x.detach())), x.dtype) if mask_of else keep(x.detach())  # type: ignore[misc]
            packed = self._hand_on(found)
            is_rounded = not (kept or mask_of or found[1].quality.is_exact)
            if isinstance(packed, SavedByHook) and (offers or mask_of or is_rounded):
                offer(x, packed, saturates=is_rounded and not offers)
            return packed

        return self._run_marked(pack, function, input)

    def _run_marked(self, packer: Callable[[Tensor], _Handle], function: Callable[..., Tensor], *args: Any) -> Tensor:
        try:
            self._packer = packer
            out: Tensor = function(*args)
        finally:
            self._packer = None
        if (node := out.grad_fn) is not None:
            node.metadata[WEIGHT_NUMEL] = 0  # type: ignore[index]  # an activation
        return out

    def run_exactly(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = self._run(self._pack_exactly, func, *args, **kwargs)
        self.give_up_saturated(tensors_of_call(args, kwargs))  # func may save a function of them, such as its result
        return result

    def give_up_saturated(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            give_up_saturated(x, self._outer)

    def refine(self, x: Tensor, keep: Callable[[Tensor], Saved]) -> None:
        give_up(x, self._outer, keep=keep)

    def run_backward(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a backward pass inside the region; it builds the second graph (:meth:`_keep_of_second_graph`)."""
        try:
            self.is_in_backward = True
            return func(*args, **kwargs)
        finally:
            self.is_in_backward = False

    def may_give_up_masks(self) -> bool:
        """Return whether there are no hooks around the region, or only a report's, which can be notified."""
        return self._outer is None or (bool(storage_report.recorders) and self.scope is None)

    def make_weight(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a torch function of weights, which saves no activation; its result is recomputed where possible."""
        result = self._run(self._pack_weight, func, *args, **kwargs)
        track_weight(self._region, func, args, kwargs, result)
        return result

    def _pack(self, x: Tensor) -> _Handle:
        if self._packer is not None:
            return self._packer(x)
        if self.cast_shapes is None:
            frame = sys._getframe().f_back
            if self.is_in_backward or frame is None:  # autograd's threads have no frame
                with DisableTorchFunction():
                    return self._hand_on(self._keep_of_second_graph(x))
            if saves_input(frame):
                with DisableTorchFunction():  # the region's mode is active: no torch function runs
                    return self._hand_on(self._keep_input_of_checkpoint(x, frame))
            return self._pack_for_other_code(x, frame)
        if not (self.reads_sizes or self.places) and self.pass_on((x,)):
            return x if x.grad_fn is None else x.detach(), x._version
        kept = self._keep(x, self._region, sys._getframe(1))
        stored = self._hand_on(kept)
        if kept[1] is not AS_IT_IS and is_tracked(x) and not kept[1].quality.is_exact:
            offer(x, stored)  # type: ignore[arg-type]  # the packed form stands in for x
        return stored

    def _pack_exactly(self, x: Tensor) -> _Handle:
        if storage_report.recorders:
            keep_exact(x, storage_report.NOT_NOISE)
        return hold(x, self._outer)

    def _pack_weight(self, x: Tensor) -> _Handle:
        is_untouched = self._outer is None and not storage_report.recorders
        if is_untouched and (type(x) is nn.Parameter or is_parameter_or_view(x) or not is_tracked(x)):
            return x if x.grad_fn is None else x.detach(), x._version
        return self._hand_on(self._region.keep_weight(x))

    def _pack_of_shape(self, x: Tensor, input: Tensor) -> _Handle:
        """Pack the input in another memory order if its frame may (:meth:`_keep`); statistics stay unpacked."""
        if x.shape != input.shape:
            return self._hand_on(keep_exact(x))
        return self._hand_on(self._keep(x, self._region, sys._getframe(3)))

    def _pack_for_other_code(self, x: Tensor, saver: FrameType) -> _Handle:
        """Pack a tensor of other code, whose backward kernels may overwrite the decoded tensor."""
        with DisableTorchFunction():
            region, unknown, call = self._keeper_for(x, saver)
            kept = self._keep(x, region, saver, unknown)
            if call is not None and region.packs and (made := call.result_with(x, kept)) is not None:
                derive(region, *made, is_curved=made[1].is_curved, is_pointwise=False)
            return self._hand_on(kept if kept[1] is AS_IT_IS else express(Own, (kept,)))

    def _hand_on(self, kept: Saved) -> _Handle:
        """Return the object that autograd holds for a tensor; hooks around the region see the stored tensors."""
        if kept[1] is AS_IT_IS:
            (x,) = kept[0]
            if is_tracked(x):
                give_up(x, self._outer)
            if x.grad_fn is not None:  # saving an output with its graph would make a cycle
                x = x.detach()
            if self._outer is None:
                return x, x._version
            kept = (x,), AS_IT_IS
        elif len(kept[0]) > 2:  # perhaps codes, a scale and a zero point
            share_codes(kept[0])
        stored = SavedByHook()
        stored.fill(kept, self._outer)
        return stored

    def _keep_of_second_graph(self, x: Tensor) -> Saved:
        """Save a backward tensor: a decoded one as its codes, a gradient packed if harmless, others unpacked."""
        region = self._region
        known = known_values.find(x)
        if known is not None:
            return reported(known)
        node = current_autograd_node()
        name = "" if node is None or not region.packs else node.name()
        if not (name in LINEAR_NODES or (name in CURVED_NODES and region.settings.derives_curved)):
            return keep_exact(x)
        if not is_activation(x) or x.numel() < region.settings.min_numel:
            return keep_exact(x, storage_report.SMALL)
        if x._is_view() and x._base is not None and x._base.is_leaf and x._base.requires_grad:
            return keep_exact(x, storage_report.VARIABLE)
        return region.keep_activation(x)

    def _keep_input_of_checkpoint(self, x: Tensor, saver: FrameType) -> Saved:
        """Save a tensor from which a checkpoint recomputes: unpacked, unless a rule for checkpoints packs it."""
        region = self._region
        if storage_report.recorders:
            storage_report.report_op(checkpoint, INPUT_OF_CHECKPOINT)
        if not is_activation(x) and not is_complex(x):
            return self._keep(x, region, saver)
        if region.by_op.get(CHECKPOINT) is None:
            return keep_exact(x, INPUT_OF_CHECKPOINT)
        return self._keep(x, region.keeper_of(CHECKPOINT), saver)

    def _keep(self, x: Tensor, region: Region, saver: FrameType, unknown: str = "") -> Saved:
        """Save a tensor of frame ``saver``; if ``unknown`` gives a reason, an activation stays unpacked."""
        settings = region.settings
        if settings is None or not region.packs:
            why = storage_report.NO_QUANTIZER
        elif not is_plain(x):
            why = storage_report.OTHER_KIND
        elif self.reads_sizes and (x.is_floating_point() or x.is_complex()):
            return reported(((), Blank(x.shape, x.stride(), x.dtype, x.device)))
        elif x.numel() < settings.min_numel and not (self.places and x.dtype in INTEGERS):
            return self._keep_small(x)
        elif not region.packs_for(saver):
            why = storage_report.OUT_OF_SIGHT
        elif x.dtype is torch.bool:
            return keep_mask(x)
        elif self.places and x.dtype in INTEGERS:
            return keep_places(x, settings, (self.places,))
        elif not (is_activation(x) or is_complex(x)):
            why = storage_report.NO_FLOATS
        elif unknown:
            known = known_values.find(x)
            if known is not None:
                return reported(known)
            why = unknown
        elif self.cast_shapes is not None and not x.requires_grad and sizes_of(x) in self.cast_shapes:
            why = storage_report.WEIGHT  # autocast's copy of a frozen weight
        else:
            return region.keep_activation(x)
        return keep_exact(x, why)

    def _keeper_for(self, x: Tensor, frame: FrameType) -> tuple[Region, str, Any]:
        """Return the region that packs a tensor of other code, by a rule or by the table, or why not, and the call."""
        region, settings = self._region, self._region.settings
        if not region.packs and not region.has_rules_for_other_code:
            return region, "", None
        name, letter, call = saver_of(x, frame)
        label, has_rule = name.rpartition(".")[2], name in region.by_op
        if storage_report.recorders and (region.packs or has_rule):
            storage_report.report_code(label)
        if has_rule:
            region = region.keeper_of(name)
        elif letter == UNKNOWN or (
            letter == SMOOTH and settings is not None and not (settings.derives_curved or settings.is_lossless)
        ):
            why = storage_report.other_code(label) if storage_report.recorders else storage_report.OTHER_CODE
            return region, why if region.packs else "", None
        if letter == GRADIENT:
            end_known_values(x)  # it may overwrite the tensor whose gradient it is
        if region.packs and (letter == SCORES or (letter == GRADIENT and not has_rule)):
            region = with_bits(region, 6 if letter == GRADIENT else 8)
        return region, storage_report.NEEDED if letter == EXACT else "", call

    def _keep_small(self, x: Tensor) -> Saved:
        """Save a tensor that is too small to pack; a weight's whole storage is in memory anyway."""
        if not (x.is_floating_point() or x.is_complex()):
            return keep_exact(x, storage_report.NO_FLOATS)
        if is_compact(x) or (x.is_leaf and x.requires_grad) or self._region.is_weight(x):
            return keep_exact(x, storage_report.SMALL)
        return keep_small(x, self._region.settings)


def sizes_of(x: Tensor) -> tuple[int, ...]:
    """Sizes other than one, sorted: the same for a transposed or unsqueezed copy."""
    return tuple(sorted(size for size in x.shape if size != 1))
