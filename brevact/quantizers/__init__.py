"""Activation quantizers: a float tensor to a `PackedActivation` and back. Needs torch only."""

from brevact.quantizers import ops as ops
from brevact.quantizers.bits import mask_multiply, pack_codes, pack_mask, unpack_codes, unpack_mask
from brevact.quantizers.checks import is_on_host
from brevact.quantizers.formats.dual_precision import DualPrecisionQuantizer
from brevact.quantizers.formats.lossless import ElementsQuantizer, LosslessQuantizer
from brevact.quantizers.formats.mixed import MixedQuantizer, MixingQuantizer
from brevact.quantizers.formats.normalized import NormalizedFormat, NormalizedQuantizer
from brevact.quantizers.formats.per_sample import SampleQuantizer, SampleWeights, widths_of_least_noise
from brevact.quantizers.formats.residual import ResidualQuantizer
from brevact.quantizers.formats.sign_magnitude import SignMagnitudeQuantizer
from brevact.quantizers.formats.uniform import Granularity, UniformQuantizer
from brevact.quantizers.formats.weibull import WeibullQuantizer
from brevact.quantizers.layout import Layout
from brevact.quantizers.normalizing import (
    decode_affine,
    decode_in_one_pass,
    denormalize,
    normalize,
    quantize_normalized,
)
from brevact.quantizers.packed import ActivationQuantizer, Decoder, PackedActivation, PackedSpec, Part
from brevact.quantizers.point_functions import PointFunction, decode_through, multiply_by_function
from brevact.quantizers.quantizer import quantize
from brevact.quantizers.reference import draw_seed
from brevact.quantizers.rounding import Rounding
from brevact.quantizers.text_form import from_text, to_text

__all__ = [
    "ActivationQuantizer",
    "Decoder",
    "DualPrecisionQuantizer",
    "ElementsQuantizer",
    "Granularity",
    "Layout",
    "LosslessQuantizer",
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
    "decode_in_one_pass",
    "decode_through",
    "denormalize",
    "draw_seed",
    "from_text",
    "is_on_host",
    "mask_multiply",
    "multiply_by_function",
    "normalize",
    "pack_codes",
    "pack_mask",
    "quantize",
    "quantize_normalized",
    "to_text",
    "unpack_codes",
    "unpack_mask",
    "widths_of_least_noise",
]
