"""The places that quantizers had in earlier versions, by which their pickles know classes."""

import sys

from brevact.quantizers.formats.dual_precision import quantizer as dual_precision
from brevact.quantizers.formats.lossless import quantizer as lossless
from brevact.quantizers.formats.mixed import quantizer as mixed
from brevact.quantizers.formats.mixed import sized_mix
from brevact.quantizers.formats.normalized import quantizer as normalized
from brevact.quantizers.formats.per_sample import quantizer as per_sample
from brevact.quantizers.formats.per_sample import widths
from brevact.quantizers.formats.residual import quantizer as residual
from brevact.quantizers.formats.sign_magnitude import quantizer as sign_magnitude
from brevact.quantizers.formats.uniform import quantizer as uniform
from brevact.quantizers.formats.weibull import quantizer as weibull

_MODULES = {
    "dual_precision": dual_precision,
    "exact": lossless,
    "mixed": mixed,
    "normalized": normalized,
    "residuals": residual,
    "sample": per_sample,
    "sample_widths": widths,
    "sign_magnitude": sign_magnitude,
    "sized_mix": sized_mix,
    "uniform": uniform,
    "weibull": weibull,
}
sys.modules.update({f"brevact.quantizers.{name}": module for name, module in _MODULES.items()})
