"""Quantizers for CPU tensors, compiled by Numba: the bytes of the plain torch reference.

Imports nothing else of brevact but private names of Numba.
"""

import numba

if numba.config.DISABLE_JIT:
    raise ImportError("Numba's compiler is disabled (NUMBA_DISABLE_JIT), and the kernels run compiled only")

from brevact.cpu_kernels.floats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from brevact.cpu_kernels.launch import (
    GridRows,
    UniformPlan,
    dequantize_grid,
    dequantize_uniform,
    draw_words,
    mask_multiply,
    moments,
    pack_codes,
    pack_mask,
    quantize_grid,
    quantize_uniform,
    range_keys,
    unpack_codes,
    unpack_mask,
)
from brevact.cpu_kernels.masks import BOOL
from brevact.cpu_kernels.memory import LARGEST_BLOCK
from brevact.cpu_kernels.pooling import PoolingPlan, can_pool, join_maps, split_maps

__all__ = [
    "BFLOAT16",
    "BOOL",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "LARGEST_BLOCK",
    "GridRows",
    "PoolingPlan",
    "UniformPlan",
    "can_pool",
    "dequantize_grid",
    "dequantize_uniform",
    "draw_words",
    "join_maps",
    "mask_multiply",
    "moments",
    "pack_codes",
    "pack_mask",
    "quantize_grid",
    "quantize_uniform",
    "range_keys",
    "split_maps",
    "unpack_codes",
    "unpack_mask",
]
