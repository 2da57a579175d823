"""Kernels are loaded together."""

import brevact.cpu_kernels.launch  # noqa: F401
