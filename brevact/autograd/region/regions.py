"""The region: code whose torch ops save packed activations.

While a region is active, a ``TorchFunctionMode`` hands each torch function that would save activations to its
counterpart (``brevact.autograd.ops``): a Function, or torch's own op with saved-tensor hooks that pack its input as a
Function would. The hooks also see all other saved tensors: those of functions without a counterpart, of scripted code,
and of other people's ``autograd.Function``s.

Regions nest: the innermost one decides. ``region(None)`` saves full precision inside a packing region.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from brevact.autograd.call_arguments import BoundCall, is_activation, operands_beside
from brevact.autograd.deriving import known_values
from brevact.autograd.deriving.layers import is_enough_for_norms
from brevact.autograd.deriving.norms import NormInput
from brevact.autograd.interop.other_code import is_in_algorithm, watch_forwards
from brevact.autograd.ops.op import Op
from brevact.autograd.region import running
from brevact.autograd.region.mode import EagerMode
from brevact.autograd.region.running import active, is_alive, is_distributed
from brevact.autograd.region.seeds import SeedStream
from brevact.autograd.region.settings import BackwardSettings, SaveMode
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import (
    AS_IT_IS,
    Saved,
    complex_of,
    distinct_elements,
    mapped,
    pairs_of,
    view_of,
    without_gaps,
)
from brevact.autograd.saving.saved_tensor_hooks import SavedTensorHooks, checkpoints_around, is_checkpoint_innermost
from brevact.autograd.saving.storages import find_record, find_shared, is_held, share_packed
from brevact.autograd.saving.store import beside, form_of, keep_exact, keep_small, pack, report_statistics, reported
from brevact.autograd.saving.weights import WEIGHT_NUMEL, ModelState, is_parameter, is_weight, node_of
from brevact.compiler import FULL_PRECISION, marks
from brevact.private_names.of_torch import (
    function_apply_code,
    is_any_autocast_enabled,
    len_dispatch_stack,
    no_dispatch_modes,
    pop_hooks,
    push_hooks,
    top_hooks,
)
from brevact.qat.integer_codes import share_codes
from brevact.quantizers import Layout

_is_grad_enabled = torch.is_grad_enabled
_ANY = Op()
_STRIDED = torch.strided


class Region:
    """One entry of the stack of active regions; the outermost one owns the mode, the seeds and the module list.

    Without settings its ops save full precision. ``owner`` is the module whose forward runs in it, None for a ``with``
    block. With ``norms_only`` nothing is packed; only norms continue with rounded values, as in eval mode.
    """

    def __init__(
        self,
        settings: BackwardSettings | None,
        owner: nn.Module | None = None,
        *,
        norms_only: bool = False,
        attachment: Any = None,
    ) -> None:
        self.outer_settings = settings
        #: Settings that replace ``settings`` for some ops, by op name.
        self.by_op = {} if settings is None else settings.by_op
        self.has_rules_for_other_code = settings is not None and settings.has_rules_for_other_code
        if settings is not None and settings.quantizer is None:
            settings = None
        self.settings: Any = settings  # never None where a handler runs
        self.owner = owner
        self.norms_only = norms_only
        #: The policy of the model that the region belongs to, or of the region around it.
        self.attachment = attachment
        self.packs = settings is not None and not norms_only
        self.rounds_norms = settings is not None and settings.quantizes_forward
        self.parent: Region | None = None
        self.op: str | None = None
        self._of_ops: dict[tuple[str, bool], Region] = {}

    def __enter__(self) -> Region:
        self.parent = active.regions[-1] if active.regions else None
        if self.packs and not sys.modules.keys().isdisjoint(running.waiting):
            running.prepare()
        self.hooks: SavedTensorHooks = SavedTensorHooks(self, None if self.parent is None else self.parent.hooks)
        self.hooks.__enter__()  # raises under torch.func transforms: nothing else has changed yet
        if self.parent is None:
            self.seeds = SeedStream(() if self.hooks.scope is None else checkpoints_around())
            self.state = ModelState(self.owner)
            self.mode = EagerMode()
            self.mode.__enter__()
        else:
            self.seeds, self.state, self.mode = self.parent.seeds, self.parent.state, self.parent.mode
            if self.attachment is None:
                self.attachment = self.parent.attachment
        #: Most multiplications per element of a layer that is recomputed for any reader.
        self.recompute = 0 if self.outer_settings is None else self.outer_settings.most_recompute
        if self.attachment is not None:
            self.attachment.has_run = True
            self.recompute = max(self.recompute, self.attachment.recompute)
        if function_apply_code is None and self.has_rules_for_other_code:
            watch_forwards(self.by_op)
        # A selective checkpoint's mode must not count packing: a tensor may be packed in forward, not in recomputation.
        self.is_counted = self.hooks.scope is not None and len_dispatch_stack() > 0
        self.is_distributed = is_distributed()
        active.regions.append(self)
        self.describe()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.hooks.__exit__(*exc_info)
        active.regions.pop()
        if self.parent is None:
            self.mode.__exit__(*exc_info)
            self.state.close()
        else:
            self.parent.describe()

    def describe(self) -> None:
        """Describe the region on its mode, which Dynamo reads: in a checkpoint inside the region nothing is packed."""
        self.mode.text = FULL_PRECISION if self.outer_settings is None else self.outer_settings.text
        self.mode.norms_only = self.norms_only or is_checkpoint_innermost()

    def region_for_op(self, name: str) -> Region:
        """Return the region, not entered yet, for an op with own settings; it packs only where this one does."""
        norms_only = self.norms_only or not _is_grad_enabled() or top_hooks(True) != self.hooks.innermost
        return self._of_op(name, norms_only)

    def _of_op(self, name: str, norms_only: bool) -> Region:
        found = self._of_ops.get((name, norms_only))
        if found is None:
            found = self._of_ops[name, norms_only] = Region(self.by_op[name], self.owner, norms_only=norms_only)
            found.op = name
        return found

    def keeper_of(self, name: str) -> Region:
        """Return the region, never entered, that packs for code that no mode sees: Functions and checkpoints."""
        found = self._of_op(name, self.norms_only)
        found.parent, found.hooks = self, self.hooks
        found.seeds, found.state, found.mode = self.seeds, self.state, self.mode
        found.is_counted, found.is_distributed = self.is_counted, self.is_distributed
        found.attachment, found.recompute = self.attachment, self.recompute
        return found

    def keep(self, x: Tensor, *, share: bool = True, norm: NormInput | None = None, settings: Any = None) -> Saved:
        """Save a floating-point or complex activation, or a norm's normalized input, by the region's settings.

        With ``share``, ``x`` is packed once for all ops that save it. For a norm, the normalized values are packed, and
        its statistics saved beside them. A view of a parameter (learned queries that several samples share) is no
        activation. Complex numbers are packed as pairs of real ones.

        Returns the registered form of ``x`` (a forward quantizer's codes, or, except for a norm, the tensors that ``x``
        derives from); otherwise the packed tensor; ``x`` itself if it has fewer than ``settings.min_numel`` elements,
        or the settings are exact. ``settings``, of calls from here, replace the region's.
        """
        if settings is None:
            if x.is_complex():
                return self._keep_pairs(x, share)
            if x._is_view() and is_parameter(x._base):
                kept = keep_exact(x.detach(), storage_report.WEIGHT)
                return kept if norm is None else norm.unpacked(kept)
            settings = self.settings
            if self.is_counted:
                with no_dispatch_modes():
                    return self.keep(x, share=share, norm=norm, settings=settings)
        normalizes = norm is not None and not settings.is_lossless
        if x.numel() < settings.min_numel:
            return beside(keep_small(x, settings), norm)
        record = find_record(x) if share else None
        if record is not None and (record.known is not None or record.held is not None):
            of_reader = settings if settings.recompute or not normalizes else None
            known = record.known and known_values.found_in(record.known, x, of_reader, self.hooks.scope)
            if is_held(x, record) and not (known is not None and known[1].quality.is_exact):
                return beside(keep_exact(x), norm)
            if known is not None and (not normalizes or is_enough_for_norms(known[1])):
                share_codes(known[0])
                if storage_report.recorders:
                    storage_report.report_saved(known, "")
                return known if norm is None else beside(known, norm)
        if settings.is_exact:
            return beside(keep_exact(x, storage_report.EXACT_POLICY), norm)
        # A checkpoint expects tensors of the same sizes again, so random sizes follow from the number of elements.
        repeats = settings.draws_size and self.hooks.are_in_checkpoint()
        key: tuple[Hashable, ...] | None = (settings.key, repeats)
        if norm is not None and normalizes:
            of_norm = norm.key
            key = None if of_norm is None else (settings.key, repeats, of_norm)
        packs = None if record is None else record.packs
        found = find_shared(x, key, self.seeds.number) if packs and key is not None else None
        if found is None:
            found = self._pack(x, settings, repeats, norm if normalizes else None)
            if share and key is not None:
                share_packed(x, key, *found, self.seeds.number if settings.is_random else 0)
        if storage_report.recorders:
            on_backward = settings.save_mode is SaveMode.QUANTIZE_ON_BACKWARD
            storage_report.report_saved(found, storage_report.ON_BACKWARD if on_backward else "")
            report_statistics(found)
        return found if norm is None or normalizes else beside(found, norm)

    def _keep_pairs(self, x: Tensor, share: bool) -> Saved:
        known = known_values.find(x)
        if known is not None:
            return reported(known)
        tensors, decoder = self.keep(pairs_of(x), share=share)
        if decoder is AS_IT_IS:
            return (complex_of(tensors[0], x.is_conj()),), AS_IT_IS
        return mapped((tensors, decoder), BoundCall(complex_of, (Tensor, x.is_conj())))

    def keep_by(self, settings: BackwardSettings, x: Tensor, norm: NormInput | None = None) -> Saved:
        """Save ``x`` by other settings than the region's: of normalized values, or of smooth functions' inputs."""
        with no_dispatch_modes() if self.is_counted else nullcontext():
            return self.keep(x, share=norm is not None, norm=norm, settings=settings)

    def _pack(self, x: Tensor, settings: BackwardSettings, repeats: bool, norm: NormInput | None) -> Saved:
        quantizer = settings.quantizer
        plan = None
        if settings.uses_fast_pack and norm is None and type(x) is Tensor and x.layout is _STRIDED and not x.is_neg():
            plan = form_of(quantizer, x.shape, x.stride(), x.dtype)
        if plan is not None:
            spec, decoder = plan
            buffer = (x.new_zeros if spec.has_padding else x.new_empty)(spec.nbytes, dtype=torch.uint8)
            seed = self.seeds.next(x.device) if quantizer.is_stochastic else None
            spec.quantizer.encode(x.detach(), spec, seed, buffer)
            return (buffer,), decoder
        if top_hooks(True) == self.hooks.pair:
            with self.hooks.suspended:  # a quantizer may use autograd, too
                return self._pack(x, settings, repeats, norm)
        if settings.draws_size:
            numel = Layout.of(x).numel
            quantizer = quantizer.with_drawn_size(numel, numel if repeats else self.seeds.next_on_host())
        if settings.save_mode is not SaveMode.SAVE_QUANTIZED:
            x = x.detach() if norm is not None else without_gaps(x.detach())
            x = distinct_elements(x).clone().expand(x.shape)  # without gaps, in its own storage
        elif _is_grad_enabled():
            x = x.detach()
        seed = self.seeds.next(x.device) if quantizer.is_stochastic else 0
        return pack(x, quantizer, settings.save_mode, seed, norm)

    def keep_activation(self, x: Tensor) -> Saved:
        """Save an operand that may be a weight: packed if it is an activation, unpacked otherwise.

        A leaf that requires a gradient, or a view of one, is somebody's variable and stays in memory anyway. A view of
        another tensor, made in a Function's forward, only looks like a leaf.
        """
        base = x._base if x.is_leaf and x._is_view() else None
        if base is not None and not base.is_leaf:
            is_whole = x.numel() == base.numel() and Layout.of(x).is_dense and Layout.of(base).is_dense
            if is_whole and x.dtype is base.dtype and not (self.settings.is_exact or is_weight(base, self.state)):
                return view_of(self.keep(base), x, x.storage_offset() - base.storage_offset())
        elif x.is_leaf and x.requires_grad:
            return keep_exact(x, storage_report.VARIABLE)
        return self.keep_weight(x) if is_weight(x, self.state) else self.keep(x)

    def keep_weight(self, x: Tensor) -> Saved:
        known = known_values.find(x)
        return keep_exact(x, storage_report.WEIGHT) if known is None else reported(known)

    def find_known(self, x: Tensor) -> Saved | None:
        """Return the registered saved form of ``x``, if its quality is at least that of the region's own quantizer."""
        return known_values.find(x, self.settings, self.hooks.scope)

    def find_kept(self, x: Tensor) -> Saved | None:
        record = find_record(x)
        if record is None:
            return None
        known = record.known and known_values.found_in(record.known, x, self.settings, self.hooks.scope)
        if known is None and record.packs and self.settings.derives and self.hooks.scope is None:
            if x.layout is torch.strided and not x.is_nested:  # without a checkpoint it lives until backward
                key, settings = (self.settings.key, False), self.settings
                known = find_shared(x, key, self.seeds.number, lambda decoder: decoder.quality.is_enough_for(settings))
        return known

    def register(self, out: Tensor, kept: Saved, *, is_dirty: bool = False, is_new: bool = False) -> None:
        known_values.register(out, *kept, scope=self.hooks.scope, is_dirty=is_dirty, is_new=is_new)

    def is_weight(self, x: Tensor) -> bool:
        return is_weight(x, self.state)

    def are_weights(self, *tensors: Tensor) -> bool:
        return self.makes_weight(_ANY, tensors)

    def makes_weight(self, row: Op, tensors: Sequence[Tensor], out: Any = None) -> bool:
        """Return whether a function of these tensors, which may overwrite ``out``, makes a weight from weights.

        Masks, integers and constants do not matter; looked-up rows are no weight.
        """
        if row.is_layer or row.makes_weight:
            return row.makes_weight
        if row.replaces:
            tensors = operands_beside(tensors, tensors[0], is_first=True)
        elif out is not None:
            tensors = operands_beside(tensors, out, is_first=False)
        found = trains = indexed = False
        for x in tensors:
            try:
                node: Any = x.grad_fn
            except RuntimeError:  # a view whose base has changed
                node = None
            if node is not None and node.metadata.get(WEIGHT_NUMEL) == 0:
                return False
            if is_weight(x, self.state):
                found, trains = True, trains or x.requires_grad
            elif x.requires_grad:
                return False
            elif x.numel() != 1 and x.dtype is not torch.bool:
                if x.is_floating_point() or x.is_complex():
                    return False
                indexed = True
        return found and not (row.looks_up and indexed and trains)

    def mark(self, result: Any, *, is_weight: bool) -> None:
        if type(result) is Tensor:
            try:
                node: Any = result.grad_fn
            except RuntimeError:  # a view whose base has changed
                node = None
            if node is not None:
                node.metadata[WEIGHT_NUMEL] = result.numel() if is_weight else 0
                return
            is_marked = result.is_floating_point() or result.is_complex() or result.dtype is torch.bool
        else:
            is_marked = isinstance(result, Tensor | tuple | list)
        if is_marked:
            self.state.mark_weight(result, weight=is_weight)

    def packs_for(self, saver: FrameType) -> bool:
        """Return whether tensors saved below a frame are packed: no compiled graph's, no matrix decomposition's."""
        if not is_alive(saver) or marks.is_compiled_graph(saver):
            return False
        return not (is_in_algorithm(saver) or is_in_algorithm(saver.f_back))  # behind `Function.apply`

    is_activation = staticmethod(is_activation)

    def can_pack_layer_input(self, x: Any) -> bool:
        return type(x) is Tensor and is_activation(x)

    def can_pack_layer(self, input: Any, weight: Any, bias: Tensor | None = None, dims: int | None = None) -> bool:
        """Return whether a layer's input can be packed, and the input, weight or bias needs a gradient.

        ``dims``: spatial dimensions of a convolution.
        """
        return (
            type(input) is Tensor
            and is_activation(input)
            and (
                (type(weight) is nn.Parameter and weight.dtype is input.dtype and weight.layout is _STRIDED)
                or is_activation(weight)
            )
            and (input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
            and (dims is None or weight.dim() == dims + 2 == input.dim() + (input.dim() == dims + 1))
        )

    def can_pack_input(self, x: Any) -> bool:
        return type(x) is Tensor and is_activation(x) and (node_of(x) is None or not is_weight(x, self.state))

    def apply(self, function: type[Any], *args: Any) -> Any:
        pop_hooks()
        try:
            return function.record(self, *args)
        finally:
            push_hooks(*self.hooks.pair)

    def torch_runner(self, *tensors: Tensor | None) -> SavedTensorHooks | None:
        """Return the hooks, to run torch's own layer; None if autocast may save copies, or for inference tensors."""
        if is_any_autocast_enabled():
            return None
        for x in tensors:
            if x is not None and x.is_inference():
                return None
        return self.hooks
