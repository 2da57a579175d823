"""How code enters a region: forward hooks let that of a module run in one, ``region`` a block of code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from brevact.autograd.abandoned_forwards import is_alive, leave_abandoned, leave_forward, leave_last, running
from brevact.autograd.active_regions import active
from brevact.autograd.compiled import mode as compiled_mode
from brevact.autograd.hook_stack import is_checkpoint_innermost
from brevact.autograd.regions import Region
from brevact.autograd.settings import BackwardSettings
from brevact.autograd.transforms import NO_ROUNDED_NORMS, is_tracing
from brevact.private_names.of_torch import top_hooks, why_hooks_are_off

_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled


class Attachment:
    """State that the hooks of one policy on one model share, by which they know each other's regions.

    The root is the hook of the model itself, None where no rule matches it.
    """

    #: Whether a region of the policy was entered, since it was made.
    has_run = False
    #: Whether one was not, since its module was in eval mode with gradients on.
    has_declined = False
    #: The largest ``recompute`` of all of its settings.
    recompute = 0

    def __init__(self) -> None:
        self.root: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of this model that a copy has not: whether it has run, and who watches its gradients."""
        return {"root": self.root, "recompute": self.recompute}

    @property
    def settings(self) -> BackwardSettings | None:
        """Settings for the model's code outside of its modules; None for full precision."""
        return None if self.root is None else self.root.settings


class _EnterRegion:
    """Forward pre-hook: the module's forward runs in a region while the module trains."""

    inherits = False
    yields = False
    """Whether the module runs as the policy around it says, if that is another one: models may share the module."""
    attachment: Attachment | None = None  # of pickles of earlier versions

    def __init__(
        self, settings: BackwardSettings | None, origin: str, label: tuple[Any, ...], attachment: Attachment | None
    ) -> None:
        self.settings = settings
        self.origin = origin
        self.label = label
        self.attachment = attachment
        if attachment is not None and settings is not None:
            attachment.recompute = max(attachment.recompute, settings.most_recompute)

    @compiled_mode.skipped_by_dynamo
    def __call__(self, module: nn.Module, args: Any) -> None:
        if _is_compiling():
            if not (self.inherits and compiled_mode.is_covered(module)):  # before the settings, which Dynamo guards
                compiled_mode.enter(self.settings, module, inherits=self.inherits)
            return
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
        compiled_mode.run_outside_dynamo(self._enter, module, frame)

    def _enter(self, module: nn.Module, frame: FrameType) -> None:
        leave_abandoned(frame)
        if compiled_mode.is_exporting():
            compiled_mode.enter(self.settings, module, inherits=self.inherits)
        elif self._is_needed(module):
            norms_only = not (module.training or _trains_around())
            entered = Region(self.settings, module, norms_only=norms_only, attachment=self.attachment).__enter__()
            running.forwards.append((module, entered, frame))

    def _is_needed(self, module: nn.Module) -> bool:
        if active.disabled:
            return False
        settings, regions = self.settings, active.regions
        if is_tracing():
            if settings is not None and settings.changes_forward:
                raise NotImplementedError(NO_ROUNDED_NORMS)
            return False
        enclosing = regions[-1] if regions else None
        around = None if enclosing is None else enclosing.attachment
        if enclosing is not None and why_hooks_are_off() is not None:  # a transform, for which the region steps aside
            return False
        if self.yields and around is not None and around is not self.attachment:
            return False
        if not _is_grad_enabled() and not _change_forward(settings, enclosing and enclosing.outer_settings):
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

    Not in a checkpoint that was entered in the region: it runs the module again where the region is gone, and expects
    equal saved tensors.
    """
    return bool(active.regions) and not (active.regions[-1].norms_only or is_checkpoint_innermost())


class _InheritRegion(_EnterRegion):
    """Forward pre-hook of a module without a rule, which runs as the module around it: called by itself, in its region.

    Inside a region of the same policy it does nothing. Its settings are those that the hook of the module around it has
    at the time, unless they are for this module alone.
    """

    inherits = True

    def __init__(self, around: Any, own: BackwardSettings | None = None) -> None:
        self.around = around
        self.own = own
        self.origin = around.origin
        self.attachment = around.attachment

    @property
    def settings(self) -> BackwardSettings | None:  # type: ignore[override]
        """Settings for ops inside; None for full precision."""
        return self.around.settings if self.own is None else self.own

    @property
    def label(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Texts that say where the settings come from."""
        return self.around.label


def _change_forward(*settings: BackwardSettings | None) -> bool:
    return any(each is not None and each.changes_forward for each in settings)


class _ExitRegion:
    """Forward hook, also called when the forward raised: leaves the region that the pre-hook entered."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    @property
    def __name__(self) -> str:
        """Nothing: `torch.jit.script` asks for it, of hooks that it compiles."""
        raise AttributeError(
            "torch.jit.script does not compile the forward hooks of backward quantization: call "
            "brevact.restore_backward(model) first, or use torch.export.export or torch.jit.trace"
        )

    @compiled_mode.skipped_by_dynamo
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_compiling():
            compiled_mode.leave(module)
        elif running.forwards:
            for forward in running.forwards:
                if forward[0] is module:
                    compiled_mode.run_outside_dynamo(leave_forward, module, sys._getframe(1))
                    break
        elif compiled_mode.is_exporting():
            compiled_mode.leave(module)


def attach_region(
    module: nn.Module,
    settings: BackwardSettings | None,
    origin: str = "layer",
    *,
    label: tuple[Any, ...] = (),
    attachment: Attachment | None = None,
) -> None:
    """Let the forward of ``module`` run in a region, through forward hooks; a second call replaces the first.

    The hooks are copied and pickled with the module. The region is active while gradients are enabled and the module
    (or the module of an enclosing region) is in training mode; norms go on with rounded values at all times, if the
    quantizer says so (``quantize_forward``).

    Args:
        module: any module; it is changed in place.
        settings: of the tensors that its ops save for backward; None keeps full precision inside an enclosing region.
        origin: who attaches it; regions of different origins stand beside each other.
        label: texts that say where the settings come from.
        attachment: state that it shares with the other regions of a policy; None for a region that stands for itself.
    """
    _attach(module, _EnterRegion(settings, origin, label, attachment))


def inherit_region(module: nn.Module, around: Any, own: BackwardSettings | None = None) -> None:
    """Let the forward of ``module`` run in a region as that of the module around it, where it is called by itself.

    Args:
        module: any module; it is changed in place.
        around: the hook (:func:`regions_of`) of the module around it.
        own: settings for this module alone, in place of those of ``around``.
    """
    _attach(module, _InheritRegion(around, own))


def _attach(module: nn.Module, hook: _EnterRegion) -> None:
    detach_region(module, hook.origin)
    hook.yields = hook.attachment is not None and is_shareable(module)
    module.register_forward_pre_hook(hook)
    module.register_forward_hook(_ExitRegion(hook.origin), always_call=True)


def is_shareable(module: nn.Module) -> bool:
    """Return whether models may share a module without knowing of each other: it holds nothing, as ``nn.SiLU()``."""
    return not (module._modules or module._parameters or module._buffers)


def takes_hooks(module: nn.Module) -> bool:
    """Return whether a module keeps forward hooks that run: one of ``torch.jit``, scripted or traced, does not."""
    return not isinstance(module, torch.jit.ScriptModule)


def detach_region(module: nn.Module, origin: str = "layer") -> bool:
    """Undo :func:`attach_region`; return whether there was anything to undo."""
    tables = (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,), _EnterRegion),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called), _ExitRegion),
    )
    found = False
    for hooks, companions, kind in tables:
        for key in [key for key, hook in hooks.items() if isinstance(hook, kind) and hook.origin == origin]:
            found = True
            for table in (hooks, *companions):
                table.pop(key, None)
    return found


def regions_of(module: nn.Module) -> list[Any]:
    """Return the hooks that hold the ``settings`` of a module's regions; new ones count from the next forward on."""
    return [hook for hook in module._forward_pre_hooks.values() if type(hook) is _EnterRegion]


def inherited_region(module: nn.Module) -> Any:
    """Return the hook of a module that runs as the module around it (:func:`inherit_region`), or None."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _InheritRegion)), None)


def attachments_of(module: nn.Module) -> list[Attachment]:
    """Return the policies whose regions a module has."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _EnterRegion)]
    return [hook.attachment for hook in hooks if hook.attachment is not None]


def has_region(module: nn.Module, origin: str = "layer") -> bool:
    """Return whether :func:`attach_region` gave ``module`` a region (which may be one of full precision)."""
    return any(hook.origin == origin for hook in regions_of(module))


class region(ContextDecorator):
    """Context manager and decorator: a block of code runs in a region.

    Args:
        settings: of the tensors that ops inside save for backward; None keeps full precision, also in another region.
        attachment: the policy of a model, if the block runs as the code of that model.
    """

    def __init__(self, settings: BackwardSettings | None, attachment: Attachment | None = None) -> None:
        self.settings = settings
        self.attachment = attachment
        if attachment is not None and settings is not None:
            attachment.recompute = max(attachment.recompute, settings.most_recompute)
        self._entered: list[Region | None] = []

    @compiled_mode.skipped_by_dynamo
    def __enter__(self) -> None:
        if _is_compiling() or compiled_mode.is_exporting():
            compiled_mode.TracingMode(compiled_mode.text_of(self.settings)).__enter__()
            return
        leave_abandoned(sys._getframe(1))
        if active.disabled or is_tracing():
            self._entered.append(None)
        else:
            self._entered.append(Region(self.settings, attachment=self.attachment).__enter__())

    @compiled_mode.skipped_by_dynamo
    def __exit__(self, *exc_info: object) -> None:
        if _is_compiling() or compiled_mode.is_exporting():
            compiled_mode.leave(None)
            return
        entered = self._entered.pop()
        if entered is None or entered not in active.regions:  # one around it was left before
            return
        while running.forwards and active.regions[-1] is not entered:  # forwards that an interrupt ended
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
def regions_disabled() -> Iterator[None]:
    """Run a block in which entering a region does nothing (to measure a model as it is without brevact)."""
    active.disabled += 1
    try:
        yield
    finally:
        active.disabled -= 1
