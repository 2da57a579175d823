"""The type of a region in annotations: the module of regions imports the handlers that they call."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brevact.autograd.regions import Region as Keeper
    from brevact.autograd.settings import BackwardSettings

    EagerKeeper = Keeper
else:
    Keeper = EagerKeeper = Any


def with_settings(region: Keeper, settings: BackwardSettings) -> Keeper:
    """Return a copy of a region with other settings, for one op."""
    other = copy.copy(region)
    other.settings = settings
    return other
