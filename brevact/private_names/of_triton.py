"""Undocumented names of Triton."""

from __future__ import annotations

from brevact.private_names.lookup import find

#: Class of the kernels that a launch returns; called with a grid, arguments and constants they launch by themselves.
CompiledKernel = find("triton.compiler.CompiledKernel", "launches without Triton's lookup", fallback=type(None))
