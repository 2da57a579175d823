"""Gradients between processes, packed: `quantized_hook` for DistributedDataParallel."""

from brevact.distributed.hook import QuantizedHook, quantized_hook

__all__ = ["QuantizedHook", "quantized_hook"]
