"""The ops of `quantizers.kernel_ops`, and a batch norm's, by name: launchers, each beside the CPU kernel that it runs.

They have the names, the parameters and the bytes of the references, take tensors that :func:`arrays.takes` accepts, and
return NotImplemented where a kernel does not take the other arguments. Work is shared among threads where that pays.
Those of some groups of a tensor, `quantize_rows` and `dequantize_rows`, have the bytes of gathering the groups first.
"""

from __future__ import annotations

from brevact.cpu_kernels.arrays import takes
from brevact.cpu_kernels.batch_norm import batch_norm, packed_batch_norm
from brevact.cpu_kernels.batch_norm_backward import batch_norm_backward, packed_batch_norm_backward
from brevact.cpu_kernels.codes import pack_codes, unpack_codes
from brevact.cpu_kernels.dequantize import denormalize, dequantize_rows, dequantize_uniform
from brevact.cpu_kernels.dequantize_grid import dequantize_grid
from brevact.cpu_kernels.fake_quantize import fake_quantize, fake_quantize_strided
from brevact.cpu_kernels.fake_quantize_backward import (
    decode_integers,
    fake_quantize_backward,
    fake_quantize_backward_strided,
)
from brevact.cpu_kernels.fill import fill
from brevact.cpu_kernels.kernels import prepare
from brevact.cpu_kernels.masks import mask_multiply, pack_mask, unpack_mask
from brevact.cpu_kernels.moments import moments
from brevact.cpu_kernels.quantize import quantize_normalized, quantize_rows, quantize_uniform
from brevact.cpu_kernels.quantize_grid import quantize_grid
from brevact.cpu_kernels.random_words import random_words
from brevact.cpu_kernels.ranges import ranges
from brevact.cpu_kernels.segments import look_up, map_levels

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "decode_integers",
    "denormalize",
    "dequantize_grid",
    "dequantize_rows",
    "dequantize_uniform",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_backward_strided",
    "fake_quantize_strided",
    "fill",
    "look_up",
    "map_levels",
    "mask_multiply",
    "moments",
    "pack_codes",
    "pack_mask",
    "packed_batch_norm",
    "packed_batch_norm_backward",
    "quantize_grid",
    "quantize_normalized",
    "quantize_rows",
    "quantize_uniform",
    "random_words",
    "ranges",
    "takes",
    "unpack_codes",
    "unpack_mask",
]

prepare()
