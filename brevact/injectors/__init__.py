"""Backward quantizers in Brevitas' dialect: injector classes for the activation slots of a layer.

A leaf (``StochBackward2bit``) is a class of data; ``.let(bucket_size=128)``, a subclass or a layer's keywords change
it. ``backward_settings_from`` resolves one into what a region takes. Importing this package makes every Brevitas
injector picklable (``brevact.injectors.pickling``).
"""

from brevact.injectors import pickling as pickling  # makes injector classes picklable
from brevact.injectors.fragments import (
    BackwardQuantSolver,
    MixedBuckets,
    NearestRounding,
    SaveQuantized,
    StochasticRounding,
    UniformBuckets,
)
from brevact.injectors.mixed import (
    NearestBackward2bit4bitMix,
    NearestBackward2bit6bitMix,
    NearestBackward3bit6bitMix,
    NearestBackward4bit8bitMix,
    StochBackward2bit4bitMix,
    StochBackward2bit6bitMix,
    StochBackward3bit6bitMix,
    StochBackward4bit8bitMix,
)
from brevact.injectors.settings import backward_settings_from
from brevact.injectors.slot import BackwardQuantProxy
from brevact.injectors.uniform import (
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

__all__ = [
    "BackwardQuantProxy",
    "BackwardQuantSolver",
    "MixedBuckets",
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
    "NearestRounding",
    "SaveQuantized",
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
    "StochasticRounding",
    "UniformBuckets",
    "backward_settings_from",
]
