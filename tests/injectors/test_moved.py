"""Pickles of earlier versions, in which formats lay elsewhere, still find their classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import brevact

#: Modules that there were, and what pickles of models, of policies and of packed activations know in them by name.
PLACES = {
    "brevact.injectors.codes": ("IntegerCodes", "MinifloatCodes"),
    "brevact.injectors.dual_precision": ("DualPrecisionBackward2bit", "DualPrecisionMaps"),
    "brevact.injectors.formats": ("IntegerFormat", "MinifloatFormat"),
    "brevact.injectors.fragments": ("Buckets", "MixedBuckets", "SaveQuantized", "UniformBuckets"),
    "brevact.injectors.lossless": ("ExactValues", "LosslessBackward"),
    "brevact.injectors.mixed": ("StochBackward2bit4bitMix",),
    "brevact.injectors.normalized": ("L4Backward", "NormalizedLevels"),
    "brevact.injectors.rounding": ("SeededStochasticRound",),
    "brevact.injectors.sample": ("SampleBuckets", "StochBackward2bitPerSample"),
    "brevact.injectors.sign_magnitude": ("SignMagnitudeBackward", "SignMagnitudeBuckets"),
    "brevact.injectors.uniform": ("NearestBackward8bit", "StochBackward2bit"),
    "brevact.injectors.weibull": ("WeibullBackward3bit", "WeibullLevels"),
    "brevact.quantizers.codes": ("pack_codes", "unpack_mask"),
    "brevact.quantizers.dual_precision": ("DualPrecisionQuantizer",),
    "brevact.quantizers.exact": ("ExactQuantizer",),
    "brevact.quantizers.mixed": ("MixedQuantizer",),
    "brevact.quantizers.mixing_quantizer": ("MixingQuantizer",),
    "brevact.quantizers.normalized": ("NormalizedCodes", "NormalizedFormat", "NormalizedQuantizer"),
    "brevact.quantizers.packed": ("PackedActivation", "quantize"),
    "brevact.quantizers.residuals": ("ResidualQuantizer",),
    "brevact.quantizers.sample": ("SampleQuantizer",),
    "brevact.quantizers.sample_widths": ("SampleWeights",),
    "brevact.quantizers.sign_magnitude": ("SignMagnitudeLevels", "SignMagnitudeQuantizer"),
    "brevact.quantizers.sized_mix": ("SizedMix",),
    "brevact.quantizers.spelling": ("to_text",),
    "brevact.quantizers.uniform": ("Granularity", "Rounding", "UniformQuantizer"),
    "brevact.quantizers.weibull": ("WeibullQuantizer",),
    "brevact.quantizers.weibull_fit": ("SideFits",),
}
LOAD = """
import pickle, sys
for place in sys.argv[1:]:
    module, _, name = place.partition(":")
    assert pickle.loads(f"c{module}\\n{name}\\n.".encode()).__name__ == name, place
    exec(f"import {module}")
    eval(f"{module}.{name}")  # an import binds the module in its package
"""


def test_classes_are_found_where_they_were_in_a_process_that_imports_nothing():
    places = [f"{module}:{name}" for module, names in PLACES.items() for name in names]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *places],
        env={**os.environ, "PYTHONPATH": str(Path(brevact.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_functions_are_found_by_the_names_that_they_had():
    from brevact.quantizers import spelling

    assert brevact.quantizers.spell is spelling.spell is brevact.quantizers.to_text
    assert brevact.quantizers.read is spelling.read is brevact.quantizers.from_text
