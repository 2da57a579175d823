"""Quantizers for CUDA and ROCm tensors in Triton: the bytes of the plain torch reference. Imports nothing of brevact.

Functions return launches: `.run()` starts one on the device of its tensors.
"""

from brevact.triton_kernels.launch import Launch
from brevact.triton_kernels.packing import MASK_BLOCK, mask_multiply, pack_codes, pack_mask, unpack_codes, unpack_mask
from brevact.triton_kernels.uniform import UniformPlan, dequantize_uniform, quantize_uniform

__all__ = [
    "MASK_BLOCK",
    "Launch",
    "UniformPlan",
    "dequantize_uniform",
    "mask_multiply",
    "pack_codes",
    "pack_mask",
    "quantize_uniform",
    "unpack_codes",
    "unpack_mask",
]
