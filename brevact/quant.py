"""The backward quantizers of all formats, like `brevitas.quant` for Brevitas.

    from brevact.quant import StochBackward2bit, WeibullBackward3bit

`brevact` exports each of them, too, and lists those that lead the documentation.
"""

# One line per format, whose `__all__` names its quantizers; `python -m scripts.leaf_stub` declares all in quant.pyi.
from brevact.quantizers.formats.dual_precision.injectors import *
from brevact.quantizers.formats.lossless.injectors import *
from brevact.quantizers.formats.mixed.injectors import *
from brevact.quantizers.formats.normalized.injectors import *
from brevact.quantizers.formats.per_sample.injectors import *
from brevact.quantizers.formats.sign_magnitude.injectors import *
from brevact.quantizers.formats.uniform.injectors import *
from brevact.quantizers.formats.weibull.injectors import *
