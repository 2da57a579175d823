"""Backward quantizers in Brevitas' dialect: injector classes for the activation slots of a layer.

A leaf (``StochBackward2bit``) is a class of data; ``.let(bucket_size=128)``, a subclass or a layer's keywords change
it. ``backward_settings_from`` resolves it into a region's settings. Importing this package makes every Brevitas
injector picklable (``brevact.injectors.injector_type``) and gives Brevitas' own layers ``act_quant=``
(``brevact.injectors.stock_layers``); the first packing region makes Brevitas' forward quantizers save few bits inside
of regions (``brevact.injectors.forward_quantizers``).
"""

import types
import typing

from brevact.injectors.formats import DualPrecisionMaps as DualPrecisionMaps
from brevact.injectors.formats import MixedBuckets as MixedBuckets
from brevact.injectors.formats import NormalizedLevels as NormalizedLevels
from brevact.injectors.formats import SampleBuckets as SampleBuckets
from brevact.injectors.formats import SignMagnitudeBuckets as SignMagnitudeBuckets
from brevact.injectors.formats import UniformBuckets as UniformBuckets
from brevact.injectors.formats import WeibullLevels as WeibullLevels
from brevact.injectors.fragments import BackwardQuantSolver as BackwardQuantSolver
from brevact.injectors.fragments import DitheredRounding as DitheredRounding
from brevact.injectors.fragments import NearestRounding as NearestRounding
from brevact.injectors.fragments import SaveQuantized as SaveQuantized
from brevact.injectors.fragments import StochasticRounding as StochasticRounding
from brevact.injectors.proxies import BackwardQuantProxy as BackwardQuantProxy
from brevact.injectors.resolve import backward_settings_from as backward_settings_from
from brevact.private_names.of_brevitas import IS_INSTALLED as _IS_INSTALLED
from brevact.quant import *

if _IS_INSTALLED:
    from brevact.injectors import forward_quantizers as forward_quantizers  # for the first region
    from brevact.injectors import stock_layers as stock_layers  # gives Brevitas' layers the slot act_quant=

if not typing.TYPE_CHECKING:  # without a list, type checkers treat names imported by `*` as exported
    __all__ = [
        name for name, each in globals().items() if not name.startswith("_") and not isinstance(each, types.ModuleType)
    ]
