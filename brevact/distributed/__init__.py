"""Packed gradient communication for DistributedDataParallel and FSDP2."""

from brevact.distributed.hook import QuantizedHook, quantized_hook
from brevact.distributed.reduce_scatter import QuantizedReduceScatter, quantized_reduce_scatter

__all__ = ["QuantizedHook", "QuantizedReduceScatter", "quantized_hook", "quantized_reduce_scatter"]
