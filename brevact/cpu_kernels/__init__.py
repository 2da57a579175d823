"""Quantizers for CPU tensors, compiled by Numba: the bytes of the plain torch reference. Imports nothing of brevact."""

from brevact.cpu_kernels.floats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from brevact.cpu_kernels.launch import UniformPlan, dequantize_uniform, quantize_uniform

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "FLOAT64", "UniformPlan", "dequantize_uniform", "quantize_uniform"]
