"""Regions of code whose ops store packed activations for backward."""

from brevact.autograd.region.module_hooks import attach_region, detach_region, has_region, region, regions_disabled
from brevact.autograd.region.regions import Region
from brevact.autograd.region.running import current_region
from brevact.autograd.region.settings import DEFAULT_MIN_NUMEL, BackwardSettings, SaveMode

__all__ = [
    "DEFAULT_MIN_NUMEL",
    "BackwardSettings",
    "Region",
    "SaveMode",
    "attach_region",
    "current_region",
    "detach_region",
    "has_region",
    "region",
    "regions_disabled",
]
