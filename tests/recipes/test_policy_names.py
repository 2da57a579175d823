import argparse

import pytest
from torch import nn

import brevact
from recipes.policy_names import named_policy


def stored(words, model):
    """Bit width and bucket size in each module; None for full precision."""
    found = {}
    for row in brevact.backward_policy(named_policy(words).apply(model)).rows:
        quantizer = row.settings and row.settings.quantizer
        found[row.module] = quantizer and (quantizer.bit_width, quantizer.bucket_size)
    return found


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.CrossEntropyLoss())


def test_named_policy_finds_quantizers_policies_and_settings(model):
    assert named_policy("L4Backward").source is brevact.L4Backward
    assert named_policy("CONV_NET").source is brevact.CONV_NET
    assert stored("StochBackward4bit:bucket_size=64", model)["0"] == (4, 64)


def test_named_policy_gives_parts_of_a_model_quantizers_of_their_own(model):
    found = stored("StochBackward2bit+norms=StochBackward4bit:bucket_size=64+loss=None", model)
    assert found["0"] == found["2"] == (2, brevact.quantizer(brevact.StochBackward2bit).bucket_size)
    assert found["1"] == (4, 64) and found["3"] is None


def test_named_policy_reads_none_as_full_precision(model):
    assert named_policy("None").apply(model) is model
    assert {row.settings for row in brevact.backward_policy(model).rows} == {None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("StochBackwrd2bit", r"is not a backward quantizer .* nearest: StochBackward2bit"),
        ("PackedActivation", r"is not a backward quantizer"),
        ("StochBackward2bit:bucket=3", r"did you mean bucket_size\?"),
        ("StochBackward2bit:64", r"'64' is not of the form setting=value"),
        ("StochBackward2bit+norm=L4Backward", r"\+norm=L4Backward is not of the form .* one of norms,"),
        ("CONV_NET+norms=L4Backward", r"is no backward quantizer"),
        ("None:bucket_size=64", r"full precision has no settings"),
    ],
)
def test_named_policy_refuses_what_it_does_not_know(words, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        named_policy(words)
