"""A note in `print(model)` on how a module with a policy saves tensors for backward."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from brevact.autograd.hooks import regions_of
from brevact.autograd.settings import bits_of


class StorageNote:
    """The ``extra_repr`` attribute of one module: its class's text and a note on the policy in force when called.

    It refers to the module weakly, so that a model is freed as before, and is copied and pickled with it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> str:
        module = self._module()
        if module is None:
            return ""
        return ", ".join(filter(None, (type(module).extra_repr(module), note_on(module))))

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageNote, (self._module(),)


def note_on(module: nn.Module) -> str:
    """Return in short how a module saves tensors, "" without a region of its own."""
    regions = regions_of(module)
    if not regions:
        return ""
    settings = regions[-1].settings
    if settings is None or settings.quantizer is None:
        return "stores full precision"
    if settings.keeps_elements:
        return f"stores full precision, recompute={settings.recompute}"
    bits = bits_of(settings.quantizer)
    higher = getattr(settings.quantizer, "mix_bit_width", None)
    if higher is not None:
        return f"stores {bits}- and {higher}-bit codes"
    return f"stores {bits}-bit codes" if bits else f"stores {type(settings.quantizer).__name__}"


def add_note(module: nn.Module) -> None:
    """Add a :class:`StorageNote` to a module's ``repr``; an ``extra_repr`` set on the instance stays."""
    vars(module).setdefault("extra_repr", StorageNote(module))


def remove_note(module: nn.Module) -> None:
    """Undo :func:`add_note`."""
    if isinstance(vars(module).get("extra_repr"), StorageNote):
        del module.extra_repr
