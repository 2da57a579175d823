import argparse

import pytest
from torch import nn

import brevact
from recipes.policies import is_packed, policy_of, variant_of


def stored(words):
    """Bit width and bucket size in each module; None for full precision."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
    found = {}
    for row in brevact.backward_policy(brevact.quantize_backward(model, policy_of(words)[0])).rows:
        quantizer = row.settings and row.settings.quantizer
        found[row.module] = quantizer and (quantizer.bit_width, getattr(quantizer, "bucket_size", None))
    return found


def test_words_name_quantizers_policies_settings_and_budgets():
    assert policy_of("L4Backward") == (brevact.L4Backward, {}) and policy_of("CONV_NET") == (brevact.CONV_NET, {})
    assert stored("StochBackward4bit:bucket_size=64")["0"] == (4, 64)
    assert policy_of("60x time=1.2") == (None, {"ratio": 60.0, "time": 1.2})
    assert [is_packed(words) for words in ("plain", "None", "checkpoint", "checkpoint+DEFAULT")] == [False] * 3 + [True]


def test_parts_of_a_model_have_quantizers_of_their_own():
    found = stored("StochBackward2bit+norms=StochBackward4bit:bucket_size=64+2*=None")
    assert found["0"] == (2, brevact.quantizer(brevact.StochBackward2bit).bucket_size)
    assert found["1"] == (4, 64) and found["2"] is None
    found = stored("DEFAULT+norms=StochBackward2bit")
    assert found["1"][0] == 2 and found["2"] == stored("DEFAULT")["2"]
    found = stored("None+norms=L4Backward")
    assert found["0"] is found["2"] is None and found["1"] is not None


def test_a_pattern_that_names_no_module_is_refused():
    with pytest.raises(ValueError, match=r"policy rule 'blocks\.7\*' matches no module"):
        stored("StochBackward2bit+blocks.7*=StochBackward4bit")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("StochBackwrd2bit", r"is not a backward quantizer .* nearest: StochBackward2bit"),
        ("StochBackward2bit:bucket=3", r"did you mean bucket_size\?"),
        ("StochBackward2bit:64", r"'64' is not of the form setting=value"),
        ("StochBackward2bit+norm=L4Backward", r"\+norm=L4Backward: write \+norms=NAME, or"),
        ("None+norms=CONV_NET", r"is no backward quantizer"),
        ("24x+norms=L4Backward", r"24x is a budget, which is fitted for the whole model"),
        ("None+norms=24x", r"24x is a budget, which is fitted for the whole model"),
        ("checkpoint+nothing", r"nothing is not a backward quantizer or policy"),
        ("20", r"a budget is written 24x"),
    ],
)
def test_unknown_words_are_refused(words, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        variant_of(words)
