"""Layer types that a file may name: those of torch.nn, brevitas.nn and brevact.nn."""

from __future__ import annotations

import types

from torch import nn

from brevact.private_names.of_brevitas import IS_INSTALLED

if IS_INSTALLED:
    import brevitas.nn as qnn

    import brevact.nn as bnn


def _types() -> dict[str, type[nn.Module]]:
    within = {"torch.nn": nn, **({"brevitas.nn": qnn, "brevact.nn": bnn} if IS_INSTALLED else {})}
    inner = [each for each in vars(nn.modules).values() if isinstance(each, types.ModuleType)]
    within |= {each.__name__: each for each in inner}
    found: dict[str, type[nn.Module]] = {}
    for place, module in within.items():
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, nn.Module) and kind not in found.values():
                found[f"{place}.{name}"] = kind
    return found


#: By public path; base classes such as `_ConvNd` by their module's path.
LAYER_TYPES: dict[str, type[nn.Module]] = _types()
