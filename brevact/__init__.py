"""Backward-only activation quantizers for Brevitas and PyTorch: train with a fraction of the activation memory.

The forward pass stays as it is; what a layer keeps for its backward pass is stored as packed 1- to 8-bit codes.
"""

from brevact.autograd import BackwardSettings, SaveMode
from brevact.injectors import (
    NearestBackward1bit,
    NearestBackward2bit,
    NearestBackward2bit4bitMix,
    NearestBackward2bit6bitMix,
    NearestBackward3bit,
    NearestBackward3bit6bitMix,
    NearestBackward4bit,
    NearestBackward4bit8bitMix,
    NearestBackward5bit,
    NearestBackward6bit,
    NearestBackward7bit,
    NearestBackward8bit,
    StochBackward1bit,
    StochBackward2bit,
    StochBackward2bit4bitMix,
    StochBackward2bit6bitMix,
    StochBackward3bit,
    StochBackward3bit6bitMix,
    StochBackward4bit,
    StochBackward4bit8bitMix,
    StochBackward5bit,
    StochBackward6bit,
    StochBackward7bit,
    StochBackward8bit,
)
from brevact.memory import MemoryReport, memory_report
from brevact.mixing import MixSchedule
from brevact.policy import backward_quant, quantize_backward, quantizer, restore_backward
from brevact.quantizers import Granularity, MixedQuantizer, PackedActivation, Rounding, UniformQuantizer

__all__ = [
    "BackwardSettings",
    "Granularity",
    "MemoryReport",
    "MixSchedule",
    "MixedQuantizer",
    "NearestBackward1bit",
    "NearestBackward2bit",
    "NearestBackward2bit4bitMix",
    "NearestBackward2bit6bitMix",
    "NearestBackward3bit",
    "NearestBackward3bit6bitMix",
    "NearestBackward4bit",
    "NearestBackward4bit8bitMix",
    "NearestBackward5bit",
    "NearestBackward6bit",
    "NearestBackward7bit",
    "NearestBackward8bit",
    "PackedActivation",
    "Rounding",
    "SaveMode",
    "StochBackward1bit",
    "StochBackward2bit",
    "StochBackward2bit4bitMix",
    "StochBackward2bit6bitMix",
    "StochBackward3bit",
    "StochBackward3bit6bitMix",
    "StochBackward4bit",
    "StochBackward4bit8bitMix",
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
