"""Packed gradient communication for DistributedDataParallel."""

from brevact.distributed.hook import QuantizedHook, quantized_hook

__all__ = ["QuantizedHook", "quantized_hook"]


def __getattr__(name: str) -> object:
    fix = ": FSDP2 exchanges gradients unpacked; leave out set_custom_reduce_scatter" * name.endswith("scatter")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{fix}")
