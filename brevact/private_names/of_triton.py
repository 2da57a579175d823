"""Private names of Triton."""

from __future__ import annotations

from brevact.private_names.lookup import find

InterpretedFunction = find("triton.runtime.interpreter.InterpretedFunction", "running Triton kernels interpreted")
#: Class of what a launch returns: its `run` launches without Triton's look-up.
CompiledKernel = find("triton.compiler.CompiledKernel", "quick launches", fallback=type(None))
#: Its `active` driver gives the address of a device's current stream, as torch does, in a fifth of the time.
driver = find("triton.runtime.driver", "quick launches")
#: What profilers of Triton have called at each launch.
hooks = find("triton.knobs.runtime", "quick launches")
