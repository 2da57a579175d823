"""Quantizers are values that name wrong arguments, and have a text form."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from brevact.quantizers import (
    DualPrecisionQuantizer,
    Layout,
    MixedQuantizer,
    NormalizedQuantizer,
    ResidualQuantizer,
    Rounding,
    SampleQuantizer,
    SampleWeights,
    SignMagnitudeQuantizer,
    UniformQuantizer,
    WeibullQuantizer,
    from_text,
    to_text,
)
from tests.quantizers.subjects import SUBJECTS

OUT_OF_RANGE = {
    UniformQuantizer: [
        ({"bit_width": 0}, "bit_width: got 0; accepted are 1, 2"),
        ({"bit_width": 9}, "bit_width: got 9"),
        ({"bucket_size": 0}, "bucket_size: got 0; accepted is an int of at least 1"),
        ({"rounding": "up"}, "rounding: got 'up'; accepted are Rounding.NEAREST, Rounding.STOCHASTIC, Ro"),
        ({"rounding": "dithered", "minimum_dtype": torch.bfloat16}, "minimum_dtype: got torch.bfloat16 with rounding"),
        ({"rounding": "dithered", "bucket_size": None}, "rounding: got 'dithered' with granularity="),
        ({"rounding": "dithered", "bucket_size": 5000}, "rounding: got 'dithered' with granularity="),
        ({"rounding": "dithered", "granularity": "sample"}, "rounding: got 'dithered' with granularity="),
        ({"granularity": "row"}, "granularity: got 'row'; accepted are Granularity.BUCKET"),
        ({"scale_dtype": torch.float16}, "scale_dtype: got torch.float16; accepted are torch.bfloat16"),
        ({"minimum_dtype": torch.float64}, "minimum_dtype: got torch.float64"),
    ],
    DualPrecisionQuantizer: [
        ({"bit_width": 32}, "bit_width: got 32; accepted are 1, 2"),
        ({"block": 0}, "block: got 0; accepted is an int of at least 1"),
        ({"rounding": "up"}, "rounding: got 'up'; accepted are Rounding.NEAREST"),
    ],
    MixedQuantizer: [
        ({"mix_prob": 1.5}, "mix_prob: got 1.5"),
        ({"mix_prob": -0.1}, "mix_prob: got -0.1"),
        ({"mix_bit_width": 9}, "mix_bit_width: got 9"),
        ({"bit_width": 32}, "bit_width: got 32"),
        ({"granularity": "channel"}, "granularity: got"),
        ({"bucket_size": 0}, "bucket_size: got 0"),
        ({"rounding": "up"}, "rounding: got 'up'"),
    ],
    NormalizedQuantizer: [
        ({"format": "L6"}, "format: got 'L6'"),
        ({"rounding": "up"}, "rounding: got 'up'"),
        ({"quantize_forward": True, "rounding": "stochastic"}, "quantize_forward=True with rounding"),
    ],
    SampleQuantizer: [
        ({"bit_width": 0.5}, "bit_width: got 0.5; accepted is a number from 1 to 8"),
        ({"bucket_size": 4}, "bucket_size: got 4"),
        ({"rounding": "up"}, "rounding: got 'up'"),
    ],
    SignMagnitudeQuantizer: [
        ({"base_levels": 0}, "base_levels: got 0; accepted is an int from 1 to 256"),
        ({"mix_levels": 257}, "mix_levels: got 257"),
        ({"bucket": 0}, "bucket: got 0"),
        ({"mix_levels_prob": float("nan")}, "mix_levels_prob: got nan"),
        ({"rounding": "up"}, "rounding: got 'up'"),
    ],
    WeibullQuantizer: [
        ({"bit_width": 5}, "bit_width: got 5; accepted are 2, 3, 4"),
        ({"bucket_size": 0}, "bucket_size: got 0"),
        ({"rounding": "up"}, "rounding: got 'up'"),
    ],
    ResidualQuantizer: [({"bit_width": 1}, "bit_width: got 1")],
}
OF_A_WRONG_TYPE = {
    UniformQuantizer: {"bit_width": (2.0, True), "bucket_size": ("512",), "channel_dim": (None,)},
    ResidualQuantizer: {"bit_width": (True,)},
    DualPrecisionQuantizer: {"bit_width": (2.0,), "block": (None,)},
    MixedQuantizer: {"mix_prob": ("half", True), "mix_bit_width": (4.0,)},
    NormalizedQuantizer: {"channel_dim": (1.0,), "quantize_forward": (1,)},
    SampleQuantizer: {"bit_width": ("2",), "bucket_size": (None,), "weights": (torch.ones(3),)},
    SignMagnitudeQuantizer: {"base_levels": (4.0,), "mix_levels": (True,), "bucket": (5.5,), "use_max": (1,)},
    WeibullQuantizer: {"bit_width": ("2",)},
}


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_settings_out_of_range_raise(kind):
    for settings, message in OUT_OF_RANGE[kind]:
        with pytest.raises(ValueError) as raised:
            kind(**settings)
        assert str(raised.value).startswith(message)


@pytest.mark.parametrize("kind", OF_A_WRONG_TYPE)
def test_settings_of_a_wrong_type_raise(kind):
    for name, values in OF_A_WRONG_TYPE[kind].items():
        for value in values:
            with pytest.raises(TypeError, match=f"^{name}: got"):
                kind(**{name: value})


@pytest.mark.parametrize("quantizer", [UniformQuantizer(), MixedQuantizer(), DualPrecisionQuantizer()], ids=str)
def test_other_inputs_and_seeds_are_refused(quantizer):
    for x in ([1.0], torch.arange(3), torch.randn(3, 3).to_sparse()):
        with pytest.raises(TypeError, match="x: got"):
            quantizer.quantize(x)
    for seed in (1.5, "1", True, torch.tensor(1.0), torch.tensor([1]), torch.tensor(1, dtype=torch.int32)):
        with pytest.raises(TypeError, match="seed: got"):
            quantizer.quantize(torch.zeros(8), seed=seed)
    with pytest.raises(TypeError, match=r"torch\.func transform"):
        torch.func.vmap(lambda x: quantizer.quantize(x, seed=1).dequantize())(torch.randn(3, 64))


class _Named(UniformQuantizer):
    """A quantizer derived by a plain class."""


@pytest.mark.parametrize(
    "quantizer", [_Named(bit_width=3), *(subject.quantizer for subject in SUBJECTS.values())], ids=str
)
def test_quantizers_are_values_with_a_text_form(quantizer):
    shown, length = repr(quantizer), len(pickle.dumps(quantizer))
    twins = copy.copy(quantizer), copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))
    for twin in (*twins, from_text(to_text(quantizer))):
        assert type(twin) is type(quantizer) and twin == quantizer and hash(twin) == hash(quantizer)
    assert from_text(to_text(quantizer)) is from_text(to_text(quantizer))
    assert repr(quantizer) == shown and len(pickle.dumps(quantizer)) == length  # no hash, which is the process'
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer.rounding = Rounding.NEAREST
    with pytest.raises(TypeError):
        type(quantizer)(4)


def test_quantizers_with_weights_have_no_text():
    with pytest.raises(TypeError, match="SampleWeights"):
        to_text(SampleQuantizer(weights=SampleWeights()))


def test_layouts_are_shared_and_hashable():
    x = torch.randn(3, 4)
    assert Layout.of(x) is Layout.of(torch.zeros(3, 4))
    assert Layout.of(x) != Layout.of(x.t()) and Layout.of(x) != Layout.of(x.double())
    assert pickle.loads(pickle.dumps(Layout.of(x))) == Layout.of(x)
