"""Backward-only activation quantizers for Brevitas and PyTorch: train with a fraction of the activation memory.

The forward pass is unchanged; the tensors that a layer saves for backward are packed as 1- to 8-bit codes.

`dir` lists verbs, policies, and six backward quantizers. All backward quantizers are in `brevact.quant`, layers in
`brevact.nn`, tensor quantizers in `brevact.quantizers`; `from brevact import NearestBackward3bit` works, too.

Without Brevitas, all of it works for models in floating point, except `brevact.nn`.
"""

import logging
from typing import TYPE_CHECKING

import brevact.heap  # noqa: F401  (before torch allocates anything large)
from brevact.api import *
from brevact.private_names.of_brevitas import IS_INSTALLED as _IS_INSTALLED
from brevact.version import __version__ as __version__

logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet unless the program configures "brevact"

if TYPE_CHECKING or _IS_INSTALLED:
    from brevact import nn as nn
    from brevact import quant as quant
else:

    def __getattr__(name: str) -> object:
        if name == "nn":
            import brevact.nn  # noqa: F401  (raises an ImportError with the fix)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # without a list, type checkers treat names imported by `*` as exported
    __all__ = """
        CONV_NET DEFAULT RECOMPUTE TRANSFORMER Adaptive BackwardPolicy BackwardSettings DualPrecisionBackward2bit
        L4Backward LosslessBackward MixSchedule NearestBackward4bit Policy SaveMode StochBackward2bit
        StochBackward2bit4bitMix WeibullBackward3bit actnn_level backward_policy backward_quant captured fit
        gradient_report memory_report noise_count parse_policy quantize_backward quantizer restore_backward
        set_heap_tuning step_report
    """.split()

    def __dir__() -> list[str]:
        """Names offered by completion; others can still be imported."""
        others = "compile distributed nn quant quantizers".split()  # hidden: names of Python and torch
        return sorted({*__all__, *others, *(name for name in globals() if name.startswith("__"))})
