"""Backward-only activation quantizers for Brevitas and PyTorch: train with a fraction of the activation memory.

The forward pass stays as it is; what a layer keeps for its backward pass is stored as packed 1- to 8-bit codes.
"""

from brevact.autograd import BackwardSettings, SaveMode
from brevact.injectors import (
    NearestBackward1bit,
    NearestBackward2bit,
    NearestBackward3bit,
    NearestBackward4bit,
    NearestBackward5bit,
    NearestBackward6bit,
    NearestBackward7bit,
    NearestBackward8bit,
    StochBackward1bit,
    StochBackward2bit,
    StochBackward3bit,
    StochBackward4bit,
    StochBackward5bit,
    StochBackward6bit,
    StochBackward7bit,
    StochBackward8bit,
)
from brevact.memory import MemoryReport, memory_report
from brevact.policy import backward_quant, quantize_backward, quantizer, restore_backward
from brevact.quantizers import Granularity, PackedActivation, Rounding, UniformQuantizer

__all__ = [
    "BackwardSettings",
    "Granularity",
    "MemoryReport",
    "NearestBackward1bit",
    "NearestBackward2bit",
    "NearestBackward3bit",
    "NearestBackward4bit",
    "NearestBackward5bit",
    "NearestBackward6bit",
    "NearestBackward7bit",
    "NearestBackward8bit",
    "PackedActivation",
    "Rounding",
    "SaveMode",
    "StochBackward1bit",
    "StochBackward2bit",
    "StochBackward3bit",
    "StochBackward4bit",
    "StochBackward5bit",
    "StochBackward6bit",
    "StochBackward7bit",
    "StochBackward8bit",
    "UniformQuantizer",
    "backward_quant",
    "memory_report",
    "quantize_backward",
    "quantizer",
    "restore_backward",
]
