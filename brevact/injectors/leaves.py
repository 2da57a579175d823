"""The backward quantizers of all formats: a line each, and `__all__` of the module that it names says which."""

from brevact.quantizers.formats.dual_precision.injectors import *
from brevact.quantizers.formats.lossless.injectors import *
from brevact.quantizers.formats.mixed.injectors import *
from brevact.quantizers.formats.normalized.injectors import *
from brevact.quantizers.formats.per_sample.injectors import *
from brevact.quantizers.formats.sign_magnitude.injectors import *
from brevact.quantizers.formats.uniform.injectors import *
from brevact.quantizers.formats.weibull.injectors import *
