"""Private names of Triton."""

from __future__ import annotations

from brevact.private_names.lookup import find

InterpretedFunction = find("triton.runtime.interpreter.InterpretedFunction", "running Triton kernels interpreted")
