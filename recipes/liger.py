"""Liger's kernels, which Triton interprets where there is no GPU: slowly, for tests and to count bytes."""

import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from recipes.domains import library
from recipes.errors import RecipeError

_convert = interpreter._implicit_cvt


def _converted(arg: Any) -> Any:
    """Triton's interpreter leaves Python's floats as they are, which kernels cast."""
    if isinstance(arg, float):
        return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
    return _convert(arg)


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return 1.0 / tl.sqrt(x)


def liger() -> ModuleType:
    """Imports `liger_kernel.transformers`; raises a RecipeError where its kernels do not run."""
    if torch.cuda.is_available():
        return library("liger_kernel.transformers")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RecipeError(
            "Liger's kernels need a GPU; to interpret them on a CPU, slowly, set TRITON_INTERPRET=1 before the command"
        )
    found = library("liger_kernel.transformers")
    interpreter._implicit_cvt = _converted
    for module in [module for name, module in sys.modules.items() if name.startswith("liger_kernel.ops")]:
        if hasattr(module, "rsqrt"):  # a function of CUDA's library
            module.rsqrt = rsqrt
    return found
