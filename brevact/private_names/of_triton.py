"""Private names of Triton."""

from __future__ import annotations

from brevact.private_names.lookup import find

InterpretedFunction = find("triton.runtime.interpreter.InterpretedFunction")
#: Class of a launch's result: its `run` launches without Triton's look-up.
CompiledKernel = find("triton.compiler.CompiledKernel")
#: Its `active` driver returns the address of a device's current stream in a fifth of torch's time.
driver = find("triton.runtime.driver")
#: Hooks of Triton profilers, called at each launch.
hooks = find("triton.knobs.runtime")
#: Base class of kernels, whose `__getitem__` returns the launcher of a grid.
kernel_interface = find("triton.runtime.jit.KernelInterface")
