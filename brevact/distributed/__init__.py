"""Packed gradient communication for DistributedDataParallel."""

from brevact.distributed.hook import QuantizedHook, quantized_hook

__all__ = ["QuantizedHook", "quantized_hook"]
