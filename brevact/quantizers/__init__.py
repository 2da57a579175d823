"""Activation quantizers: a float tensor to a `PackedActivation` and back. Needs torch only."""

from brevact.quantizers import ops as ops
from brevact.quantizers.codes import mask_multiply, pack_codes, pack_mask, unpack_codes, unpack_mask
from brevact.quantizers.dual_precision import DualPrecisionQuantizer
from brevact.quantizers.exact import ExactQuantizer
from brevact.quantizers.layout import Layout
from brevact.quantizers.mixed import MixedQuantizer
from brevact.quantizers.mixing_quantizer import MixingQuantizer
from brevact.quantizers.normalized import NormalizedFormat, NormalizedQuantizer
from brevact.quantizers.normalizing import (
    PointFunction,
    decode_affine,
    decode_through,
    denormalize,
    normalize,
    quantize_normalized,
)
from brevact.quantizers.packed import ActivationQuantizer, Decoder, PackedActivation, PackedSpec, Part, quantize
from brevact.quantizers.philox import draw_seed
from brevact.quantizers.residuals import ResidualQuantizer
from brevact.quantizers.sample import SampleQuantizer
from brevact.quantizers.sample_widths import SampleWeights, widths_of_least_noise
from brevact.quantizers.sign_magnitude import SignMagnitudeQuantizer
from brevact.quantizers.spelling import read, spell
from brevact.quantizers.tracing import is_traced
from brevact.quantizers.uniform import Granularity, Rounding, UniformQuantizer
from brevact.quantizers.weibull import WeibullQuantizer

__all__ = [
    "ActivationQuantizer",
    "Decoder",
    "DualPrecisionQuantizer",
    "ExactQuantizer",
    "Granularity",
    "Layout",
    "MixedQuantizer",
    "MixingQuantizer",
    "NormalizedFormat",
    "NormalizedQuantizer",
    "PackedActivation",
    "PackedSpec",
    "Part",
    "PointFunction",
    "ResidualQuantizer",
    "Rounding",
    "SampleQuantizer",
    "SampleWeights",
    "SignMagnitudeQuantizer",
    "UniformQuantizer",
    "WeibullQuantizer",
    "decode_affine",
    "decode_through",
    "denormalize",
    "draw_seed",
    "is_traced",
    "mask_multiply",
    "normalize",
    "pack_codes",
    "pack_mask",
    "quantize",
    "quantize_normalized",
    "read",
    "spell",
    "unpack_codes",
    "unpack_mask",
    "widths_of_least_noise",
]
