# ruff: noqa: F401
"""The ops of `quantizers.kernel_ops`, and a batch norm's, by name: launchers, each beside the CPU kernel that it runs.

They have the names, the parameters and the bytes of the references, take tensors that `can_run` accepts, and
return NotImplemented where a kernel does not take the other arguments. Work is shared among threads where that pays."""

from __future__ import annotations

import functools

from brevact.cpu_kernels.batch_norm import batch_norm, batch_norm_backward
from brevact.cpu_kernels.fake_quantize import decode_integers, fake_quantize, fake_quantize_backward
from brevact.cpu_kernels.kernels import load
from brevact.cpu_kernels.levels import dequantize_grid, look_up, map_levels, quantize_grid
from brevact.cpu_kernels.packing import mask_multiply, pack_codes, pack_mask, unpack_codes, unpack_mask
from brevact.cpu_kernels.uniform import dequantize_uniform, quantize_uniform
from brevact.geometry import are_plain

can_run = functools.partial(are_plain, on_gpu=False)
load(__name__)
