"""Quantizers for CUDA and ROCm tensors in Triton: the bytes of the plain torch reference. Imports nothing of brevact.

Functions return launches: `.run()` starts one on the device of its tensors.
"""

from brevact.triton_kernels.grids import GridRows, dequantize_grid, moments, quantize_grid, ranges
from brevact.triton_kernels.launch import Launch
from brevact.triton_kernels.normalize import Normalization
from brevact.triton_kernels.packing import MASK_BLOCK, mask_multiply, pack_codes, pack_mask, unpack_codes, unpack_mask
from brevact.triton_kernels.pooling import PoolingPlan, can_pool, join_maps, split_maps
from brevact.triton_kernels.uniform import UniformPlan, dequantize_uniform, quantize_uniform

__all__ = [
    "MASK_BLOCK",
    "GridRows",
    "Launch",
    "Normalization",
    "PoolingPlan",
    "UniformPlan",
    "can_pool",
    "dequantize_grid",
    "dequantize_uniform",
    "join_maps",
    "mask_multiply",
    "moments",
    "pack_codes",
    "pack_mask",
    "quantize_grid",
    "quantize_uniform",
    "ranges",
    "split_maps",
    "unpack_codes",
    "unpack_mask",
]
