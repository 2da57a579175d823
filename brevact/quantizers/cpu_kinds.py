"""The codes by which the CPU kernels know types."""

from __future__ import annotations

import torch

from brevact import cpu_kernels

KINDS = {
    torch.float32: cpu_kernels.FLOAT32,
    torch.bfloat16: cpu_kernels.BFLOAT16,
    torch.float16: cpu_kernels.FLOAT16,
    torch.float64: cpu_kernels.FLOAT64,
    torch.bool: cpu_kernels.BOOL,
}
