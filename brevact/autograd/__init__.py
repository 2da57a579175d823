# ruff: noqa: F401
"""Regions of code whose ops store packed activations for backward."""

from brevact.autograd.hooks import attach_region, detach_region, has_region, region, regions_disabled
from brevact.autograd.regions import Region
from brevact.autograd.running import current_region
from brevact.autograd.settings import DEFAULT_MIN_NUMEL, BackwardSettings, SaveMode
