"""Enter regions: by forward hooks for a module, by ``region`` for a block of code."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from brevact.autograd.region.regions import Region
from brevact.autograd.region.running import active, is_alive, is_tracing, leave_abandoned, leave_forward, leave_last
from brevact.autograd.region.settings import BackwardSettings
from brevact.autograd.saving.saved_tensor_hooks import is_checkpoint_innermost
from brevact.compiler import marks
from brevact.compiler.tracing import enter_block, enter_module, leave, traced_as
from brevact.private_names.of_torch import top_hooks, why_hooks_are_off

_is_grad_enabled = torch.is_grad_enabled


class Attachment:
    """State shared by one policy's hooks on one model; ``root`` is the model's own hook, None if no rule matches it."""

    has_run = False
    #: Whether one was not entered because its module was in eval mode with gradients on.
    has_declined = False
    #: The largest ``recompute`` of its settings.
    recompute = 0

    def __init__(self) -> None:
        self.root: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Omit the state that a copy does not share: whether the model has run, and its gradient observers."""
        return {"root": self.root, "recompute": self.recompute}

    @property
    def settings(self) -> BackwardSettings | None:
        """Settings for the model's code outside its modules; None for full precision."""
        return None if self.root is None else self.root.settings


class _EnterRegion:
    """Forward pre-hook that runs the module's forward in a region while the module trains."""

    is_of_region = True
    inherits = False
    yields = False
    """Whether another policy around the module takes precedence: models may share the module."""

    def __init__(
        self, settings: BackwardSettings | None, origin: str, label: tuple[Any, ...], attachment: Attachment | None
    ) -> None:
        self.settings = settings
        self.origin = origin
        self.label = label
        self.attachment = attachment
        if attachment is not None and settings is not None:
            attachment.recompute = max(attachment.recompute, settings.most_recompute)

    @traced_as(enter_module)
    def __call__(self, module: nn.Module, args: Any) -> None:
        regions, frame = active.regions, sys._getframe(1)
        if regions:
            enclosing = regions[-1]
            if (
                (
                    (self.inherits and enclosing.attachment is self.attachment)
                    or enclosing.outer_settings is self.settings
                )
                and enclosing.owner is not module  # it does not call itself
                and top_hooks(True) == enclosing.hooks.innermost
                and not enclosing.norms_only
                and is_alive(frame)
            ):
                return
        leave_abandoned(frame)
        if self._is_needed(module):
            norms_only = not (module.training or _trains_around())
            entered = Region(self.settings, module, norms_only=norms_only, attachment=self.attachment).__enter__()
            active.forwards.append((module, entered, frame))

    def _is_needed(self, module: nn.Module) -> bool:
        if active.disabled:
            return False
        settings, regions = self.settings, active.regions
        if is_tracing(settings):
            return False
        enclosing = regions[-1] if regions else None
        around = None if enclosing is None else enclosing.attachment
        if enclosing is not None and why_hooks_are_off() is not None:  # a transform, which suspends the region
            return False
        if self.yields and around is not None and around is not self.attachment:
            return False
        both = settings, enclosing and enclosing.outer_settings
        if not _is_grad_enabled() and not any(each is not None and each.changes_forward for each in both):
            return False
        if enclosing is None:
            if settings is None:
                return False
            if not module.training and self.attachment is not None:
                self.attachment.has_declined = True
            return module.training or settings.changes_forward
        same = enclosing.outer_settings is settings or enclosing.outer_settings == settings
        same = same or (self.inherits and enclosing.attachment is self.attachment)
        return not same or not enclosing.hooks.are_innermost() or (enclosing.norms_only and module.training)


def _trains_around() -> bool:
    """Return whether a region packs around a module in eval mode, which then packs, too.

    False in a checkpoint entered in the region: it reruns the module outside the region, and expects equal saved
    tensors.
    """
    return bool(active.regions) and not (active.regions[-1].norms_only or is_checkpoint_innermost())


class _InheritRegion(_EnterRegion):
    """Forward pre-hook of a module without a rule: called by itself, the module runs in its parent's region.

    Inside a region of the same policy the hook does nothing. Its settings are the current ones of the parent's hook
    (``around``).
    """

    inherits = True

    def __init__(self, around: Any) -> None:
        self.around = around
        self.origin = around.origin
        self.attachment = around.attachment

    @property
    def settings(self) -> BackwardSettings | None:  # type: ignore[override]
        return self.around.settings

    @property
    def label(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.around.label


class _ExitRegion:
    """Forward hook that leaves the region that the pre-hook entered; also called if the forward raised."""

    is_of_region = True

    @traced_as(leave)
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        leave_forward(module, sys._getframe(1))


def attach_region(
    module: nn.Module,
    settings: BackwardSettings | None,
    origin: str = "layer",
    *,
    label: tuple[Any, ...] = (),
    attachment: Attachment | None = None,
) -> None:
    """Run the forward of ``module`` in a region, through forward hooks; a second call replaces the first.

    The hooks are copied and pickled with the module. The region is active while gradients are enabled and the module
    (or the module of an enclosing region) is in training mode; with the quantizer's ``quantize_forward``, norms always
    return rounded values. Without settings the module keeps full precision inside an enclosing region. Regions of
    different ``origin`` coexist. ``label``: texts on the settings' origin.
    """
    _attach(module, _EnterRegion(settings, origin, label, attachment))


def inherit_region(module: nn.Module, around: Any) -> None:
    """Run the forward of ``module``, if called by itself, in a region like its parent's; modifies the module in place.

    ``around`` is the parent's hook (:func:`regions_of`).
    """
    _attach(module, _InheritRegion(around))


def _attach(module: nn.Module, hook: _EnterRegion) -> None:
    detach_region(module, hook.origin)
    hook.yields = hook.attachment is not None and is_shareable(module)
    entering = module.register_forward_pre_hook(hook)
    leaving = module.register_forward_hook(_ExitRegion(), always_call=True)
    for table, handle in zip(_tables_of(module), (entering, leaving, leaving), strict=True):
        table[_key_of(hook.origin)] = table.pop(handle.id)


def _tables_of(module: nn.Module) -> tuple[Any, ...]:
    return module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called


def _key_of(origin: str) -> int:
    """Return an origin's key; Dynamo guards on keys: with equal ones, blocks of one class share a graph."""
    return -1 - zlib.crc32(origin.encode())


def is_shareable(module: nn.Module) -> bool:
    """Return whether models may share a module unknowingly: it holds no state, like ``nn.SiLU()``."""
    return not (module._modules or module._parameters or module._buffers)


def takes_hooks(module: nn.Module) -> bool:
    """Return whether a module runs forward hooks: scripted and traced ``torch.jit`` modules do not."""
    return not isinstance(module, torch.jit.ScriptModule)


def detach_region(module: nn.Module, origin: str = "layer") -> bool:
    """Undo :func:`attach_region`; return whether there was anything to undo."""
    return any([table.pop(_key_of(origin), None) is not None for table in _tables_of(module)])


def regions_of(module: nn.Module) -> list[Any]:
    """Return the hooks with the ``settings`` of a module's regions; new settings apply from the next forward on."""
    return [hook for hook in module._forward_pre_hooks.values() if type(hook) is _EnterRegion]


def inherited_region(module: nn.Module) -> Any:
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _InheritRegion)), None)


def attachments_of(module: nn.Module) -> list[Attachment]:
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _EnterRegion)]
    return [hook.attachment for hook in hooks if hook.attachment is not None]


def has_region(module: nn.Module, origin: str = "layer") -> bool:
    return any(hook.origin == origin for hook in regions_of(module))


class region(ContextDecorator):
    """Context manager and decorator that runs a block of code in a region, of the model whose policy is attached.

    Without settings, ops inside save full precision, also in another region.
    """

    def __init__(self, settings: BackwardSettings | None, attachment: Attachment | None = None) -> None:
        self.settings = settings
        self.attachment = attachment
        self._entered: list[Region | None] = []

    @traced_as(enter_block)
    def __enter__(self) -> None:
        leave_abandoned(sys._getframe(1))
        if active.disabled or is_tracing(self.settings):
            self._entered.append(None)
        else:
            self._entered.append(Region(self.settings, attachment=self.attachment).__enter__())

    @traced_as(leave)
    def __exit__(self, *exc_info: object) -> None:
        entered = self._entered.pop()
        if entered is None or entered not in active.regions:  # an enclosing one was left before
            return
        while active.forwards and active.regions[-1] is not entered:  # forwards that an interrupt ended
            leave_last()
        is_innermost = active.regions[-1] is entered
        while active.regions[-1] is not entered:
            active.regions[-1].__exit__(None, None, None)
        entered.__exit__(*exc_info)
        if not is_innermost:
            raise RuntimeError(
                "a block of backward quantization ends before one that began inside of it, which ends with it; leave "
                "blocks in the reverse order of entering them: generators that hold one are closed the last one first"
            )


@contextmanager
def regions_disabled(is_compiled: bool = False) -> Iterator[None]:
    """Run a block in which entering a region does nothing (to measure a model without brevact), compiled or not."""
    active.disabled += 1
    try:
        with marks.PlainMode() if is_compiled else nullcontext():
            yield
    finally:
        active.disabled -= 1
