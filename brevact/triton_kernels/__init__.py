# ruff: noqa: F401
"""Kernels for CUDA and ROCm tensors, in Triton, with the bytes of the references in plain torch.

Functions have the names and the parameters of `quantizers.kernel_ops` and `integer_ops`; they launch kernels, and wait
for nothing.
"""

from brevact.triton_kernels.grids import dequantize_grid, quantize_grid
from brevact.triton_kernels.integers import decode_integers, fake_quantize, fake_quantize_backward
from brevact.triton_kernels.launch import can_run
from brevact.triton_kernels.packing import mask_multiply, pack_codes, pack_mask, unpack_codes, unpack_mask
from brevact.triton_kernels.segments import look_up, map_levels
from brevact.triton_kernels.uniform import dequantize_uniform, quantize_uniform
