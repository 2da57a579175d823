"""The layers that a policy was fitted for, by which it recognizes its model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import nn

from brevact.injectors.proxies import modules_without_own_region

#: Names per kind that an error lists.
_SHOWN = 5


def layers_of(model: nn.Module) -> dict[str, str]:
    """Return the types of a model's modules by name, without layers that have their own backward quantizer."""
    return {name: type(module).__name__ for name, module in modules_without_own_region(model)}


def check_layers(model: nn.Module, layers: Mapping[str, str]) -> None:
    """Raise a ValueError unless a model's modules have the names and types, or subclasses, of a fitted policy's."""
    modules = dict(modules_without_own_region(model))
    missing = [name for name in layers if name not in modules]
    added = [name for name in modules if name not in layers]
    changed = [
        f"{name or '(model)'} is a {type(module).__name__}, and was a {layers[name]}"
        for name, module in modules.items()
        if name in layers and layers[name] not in [kind.__name__ for kind in type(module).__mro__]
    ]
    if not missing and not added and not changed:
        return
    differences = changed[:_SHOWN] + [f"and {len(changed) - _SHOWN} more of another kind"] * (len(changed) > _SHOWN)
    for what, names, others in (("missing", missing, added), ("new", added, ())):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            near = difflib.get_close_matches(names[0], others, n=3, cutoff=0.4)
            hint = f" (nearest: {', '.join(near)})" if near else ""
            differences.append(f"{what}: {', '.join(names[:_SHOWN])}{more}{hint}")
    raise ValueError(
        f"policy: it was fitted for another model than this {type(model).__name__}; {'; '.join(differences)}; give it "
        "to the model that it was fitted for (the one inside of a wrapper: model.module), or fit again"
    )
