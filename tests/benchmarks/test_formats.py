import pytest
import torch

import brevact
from benchmarks import formats
from brevact.autograd.region.settings import DEFAULT_MIN_NUMEL


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, 16, 16, generator=generator)
    names = ["NearestBackward4bit", "StochBackward2bit", "StochL3Backward", "L4Backward"]
    return list(formats.measure(names, {"one": [x], "two": [x, x[:4] * 3]}, draws=8, repeats=1))


def test_leaves_has_every_format_that_leaves_the_forward_pass_alone():
    names = formats.leaves()
    assert {"StochBackward2bit", "NearestBackward8bit", "StochBackward2bit4bitMix", "L4Backward"} <= names.keys()
    assert "L4ForwardBackward" not in names and "PackedActivation" not in names


def test_measure_tells_biased_from_unbiased(rows):
    by_name = {row["quantizer"]: row for row in rows if row["data"] == "one"}
    nearest, stochastic = by_name["NearestBackward4bit"], by_name["StochBackward2bit"]
    assert nearest["bias"] == nearest["error"] != "0" and nearest["variance"] == "0"
    assert stochastic["bias"] == "0"
    # The mean square of the error of an unbiased quantizer is its variance; both are printed with three digits.
    assert float(stochastic["error"]) ** 2 == pytest.approx(float(stochastic["variance"]), rel=0.02)


def test_measure_gives_measured_bits(rows):
    x = torch.randn(8, 16, 16, 16)
    for row in rows[::2]:
        packed = brevact.quantizer(getattr(brevact, row["quantizer"])).quantize(x, seed=0)
        assert row["bits"] == f"{8 * packed.nbytes / x.numel():.3g}"


def test_measure_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="quantizers: got Int8"):
        list(formats.measure(["Int8"], {}, draws=8, repeats=1))
    with pytest.raises(ValueError, match="draws: got 1"):
        list(formats.measure(["L4Backward"], {}, draws=1, repeats=1))


def test_kept_activations_are_those_of_a_training_step():
    kept = formats.kept_activations(epochs=0)
    assert all(x.is_floating_point() and x.numel() >= DEFAULT_MIN_NUMEL for x in kept)
    assert len({x.data_ptr() for x in kept}) == len(kept) > 20
