"""The places that injectors had in earlier versions, by which their pickles know classes."""

from brevact.injectors import brevitas_formats, fragments, number_codes, resolve, seeded_rounding
from brevact.quantizers.formats.dual_precision import injectors as dual_precision
from brevact.quantizers.formats.lossless import injectors as lossless
from brevact.quantizers.formats.mixed import injectors as mixed
from brevact.quantizers.formats.normalized import injectors as normalized
from brevact.quantizers.formats.per_sample import injectors as per_sample
from brevact.quantizers.formats.sign_magnitude import injectors as sign_magnitude
from brevact.quantizers.formats.uniform import injectors as uniform
from brevact.quantizers.formats.weibull import injectors as weibull
from brevact.quantizers.moved import let_import_from

_MODULES = {
    "codes": number_codes,
    "dual_precision": dual_precision,
    "formats": brevitas_formats,
    "lossless": lossless,
    "mixed": mixed,
    "normalized": normalized,
    "rounding": seeded_rounding,
    "sample": per_sample,
    "settings": resolve,
    "sign_magnitude": sign_magnitude,
    "uniform": uniform,
    "weibull": weibull,
}
let_import_from(__name__.rpartition(".")[0], _MODULES)
vars(fragments).update(Buckets=uniform.Buckets, UniformBuckets=uniform.UniformBuckets, MixedBuckets=mixed.MixedBuckets)
