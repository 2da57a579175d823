"""The places that quantizers had in earlier versions, by which their pickles know classes."""

import sys
from collections.abc import Mapping
from types import ModuleType

from brevact.quantizers import bits, packed, text_form
from brevact.quantizers.formats.dual_precision import quantizer as dual_precision
from brevact.quantizers.formats.lossless import quantizer as lossless
from brevact.quantizers.formats.mixed import mixing_quantizer, sized_mix
from brevact.quantizers.formats.mixed import quantizer as mixed
from brevact.quantizers.formats.normalized import quantizer as normalized
from brevact.quantizers.formats.per_sample import quantizer as per_sample
from brevact.quantizers.formats.per_sample import widths
from brevact.quantizers.formats.residual import quantizer as residual
from brevact.quantizers.formats.sign_magnitude import quantizer as sign_magnitude
from brevact.quantizers.formats.uniform import quantizer as uniform
from brevact.quantizers.formats.weibull import fit, levels
from brevact.quantizers.formats.weibull import quantizer as weibull
from brevact.quantizers.quantizer import quantize

_MODULES = {
    "codes": bits,
    "dual_precision": dual_precision,
    "exact": lossless,
    "mixed": mixed,
    "mixing_quantizer": mixing_quantizer,
    "normalized": normalized,
    "residuals": residual,
    "sample": per_sample,
    "sample_widths": widths,
    "sign_magnitude": sign_magnitude,
    "sized_mix": sized_mix,
    "spelling": text_form,
    "uniform": uniform,
    "weibull": weibull,
    "weibull_fit": fit,
    "weibull_levels": levels,
}


def let_import_from(package: str, modules: Mapping[str, ModuleType]) -> None:
    """Let modules be imported from a package, by the names that they had there, as if they still were there."""
    sys.modules.update({f"{package}.{name}": module for name, module in modules.items()})
    vars(sys.modules[package]).update(modules)  # `import` of what is loaded does not set it


_PACKAGE = __name__.rpartition(".")[0]
let_import_from(_PACKAGE, _MODULES)
vars(packed).update(quantize=quantize)
_TEXT_NAMES = {"spell": text_form.to_text, "read": text_form.from_text}
vars(text_form).update(_TEXT_NAMES)
vars(sys.modules[_PACKAGE]).update(_TEXT_NAMES)
