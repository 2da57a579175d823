"""Policies as text."""

import pytest
import torch
from torch import nn

import brevact


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))


def loss(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("default", brevact.DEFAULT),
        (" TRANSFORMER\n", brevact.TRANSFORMER),
        ("conv_net", brevact.CONV_NET),
        ("StochBackward2bit", brevact.StochBackward2bit),
    ],
)
def test_parse_policy_finds_policies_and_quantizers_by_name(text, source):
    spec = brevact.parse_policy(text)
    assert spec.source is source and not spec.needs_fit and spec.text == text.strip()


def test_parse_policy_reads_settings_also_of_policies():
    quantizer = brevact.quantizer(brevact.parse_policy("StochBackward2bit:bucket_size=64,rounding=nearest").source)
    assert (quantizer.bit_width, quantizer.bucket_size, quantizer.rounding) == (2, 64, brevact.Rounding.NEAREST)
    policy = brevact.parse_policy("default:save_mode=quantize_on_backward").source
    assert policy.rules.keys() == brevact.DEFAULT.rules.keys()
    assert {leaf.save_mode for leaf in policy.rules.values()} == {brevact.SaveMode.QUANTIZE_ON_BACKWARD}


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("24x", {"ratio": 24.0}),
        ("1.5x", {"ratio": 1.5}),
        (".5GiB", {"saved_bytes": 2**29}),
        ("3000B", {"saved_bytes": 3000}),
        ("noise=5e-2", {"noise": 0.05}),
        ("60x noise=0.002", {"ratio": 60.0, "noise": 0.002}),
        ("512MiB noise=0.01 time=1.15", {"saved_bytes": 2**29, "noise": 0.01, "time": 1.15}),
    ],
)
def test_parse_policy_reads_budgets(text, budget):
    spec = brevact.parse_policy(text)
    assert spec.needs_fit and spec.budget == budget and spec.source is None


def test_parse_policy_reads_the_file_of_a_policy(tmp_path):
    path = tmp_path / "policy.json"
    brevact.CONV_NET.save(path)
    assert brevact.parse_policy(path).source == brevact.parse_policy(str(path)).source == brevact.CONV_NET
    with pytest.raises(FileNotFoundError, match=r"other\.json"):
        brevact.parse_policy(tmp_path / "other.json")
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(ValueError, match=r"wrong\.json holds no policy"):
        brevact.parse_policy(tmp_path / "wrong.json")


def test_attach_gives_a_model_full_precision_a_policy_or_one_that_fits_a_budget():
    batches = list(torch.randn(3, 64, 64))
    plain = brevact.parse_policy("none").attach(model())
    assert {row.settings for row in brevact.backward_policy(plain).rows} == {None}
    report = brevact.memory_report(plain, batches[0])
    assert report.saved_bytes == report.plain_bytes
    spec = brevact.parse_policy("4x")
    policy = spec.policy_for(model(), batches, loss)
    assert policy.report.ratio >= 4
    assert len(brevact.backward_policy(spec.attach(model(), batches, loss)).rows) == 4
    with pytest.raises(ValueError, match="'4x' is a budget, which is fitted on batches; accepted are at least 2"):
        spec.attach(model())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("StochBackward2bt", ValueError, 'nearest: StochBackward2bit.* accepted are "default"'),
        ("StochBackward2bit:bucket=3", ValueError, r"did you mean bucket_size\?"),
        ("StochBackward2bit:64", ValueError, "'64' is not of the form setting=value"),
        ("StochBackward2bit:bit_width=9", ValueError, "bit_width.*9"),
        ("0x", ValueError, "got 0; accepted is a number above 0"),
        ("noise=0", ValueError, "accepted is a number above 0"),
        ("0.4B", ValueError, "got 0.4; accepted is a number above 0, and at least 1 byte"),
        ("1e308GiB", ValueError, "got inf; accepted is a number above 0"),
        pytest.param(
            "StochBackward2bit:bucket_size=" + "-" * 10**5 + "1",
            ValueError,
            "bucket_size: got '---.* of type str",
            id="deep",
        ),
        ("StochBackward2bit:bucket_size={[]:1}", ValueError, "bucket_size: got .* of type str"),
        ("24", ValueError, r"24: a budget is written 24x, 512MiB \(B, KiB, MiB, GiB\), noise=0\.05"),
        *((text, ValueError, f"{text}: a budget is written") for text in ("24X", "512MB", "2g")),
        ("1 x", ValueError, "1: a budget is written"),
        ("noise=0.05x", ValueError, "a budget is written"),
        ("-3x", ValueError, "got -3; accepted is a number above 0"),
        ("noise=-1", ValueError, "got -1; accepted is a number above 0"),
        ("24x peak=2 GiB", ValueError, 'a budget such as "24x", "512MiB", "noise=0.05"'),
        ("24x peak=2GiB", ValueError, "is not a backward quantizer or policy"),
        ("-3", ValueError, "got -3; accepted is a number above 0"),
        ("24x 30x", ValueError, "30x says ratio a second time"),
        ("24x time=0", ValueError, "got 0; accepted is a number above 0"),
        ("24x DEFAULT", ValueError, "is not a backward quantizer or policy"),
        ("", ValueError, "is not a backward quantizer"),
        (24, TypeError, "got 24 of type int; accepted are"),
        (None, TypeError, "got None of type NoneType"),
    ],
)
def test_parse_policy_refuses(text, error, message):
    with pytest.raises(error, match=message):
        brevact.parse_policy(text)


WORDS = ["default", "StochBackward2bit", "StochBackward4bit:bucket_size=64", "none", "transformer"]


@pytest.mark.parametrize("words", WORDS)
def test_texts_stand_for_policies_wherever_one_is_taken(words, tmp_path):
    source, x = brevact.parse_policy(words).source, torch.randn(256, 64)
    expected = brevact.backward_policy(brevact.quantize_backward(model(), source))
    assert brevact.backward_policy(brevact.quantize_backward(model(), f" {words}\n")) == expected
    policy = source if isinstance(source, brevact.Policy) else brevact.Policy({"*": source})
    policy.save(tmp_path / "policy.json")
    for path in (tmp_path / "policy.json", str(tmp_path / "policy.json")):
        found = brevact.backward_policy(brevact.quantize_backward(model(), path))
        assert [row.settings for row in found.rows] == [row.settings for row in expected.rows]
    if words != "transformer":  # whose rules are for modules
        seeds = []
        for given in (source, words):
            torch.manual_seed(0)
            net = model()
            with brevact.backward_quant(given):
                net(x).square().mean().backward()
            seeds.append([p.grad for p in net.parameters()])
        assert all(map(torch.equal, *seeds))
    report = brevact.gradient_report(model(), [x, -x], loss, words, draws=2, progress=False)
    assert (report.noise == 0) == (words == "none")


@pytest.mark.parametrize("words", ["24x", "512MiB", "noise=0.05"])
def test_a_budget_is_refused_with_advice_where_there_are_no_batches(words):
    call = {"24x": "ratio=24.0", "512MiB": "saved_bytes=536870912", "noise=0.05": "noise=0.05"}[words]
    message = rf"'{words}' is a budget.* policy = brevact\.fit\(model, batches, loss, {call}\).*HuggingFaceCallback"
    for take in (lambda words: brevact.quantize_backward(model(), words), brevact.backward_quant):
        with pytest.raises(ValueError, match=message):
            take(words)


@pytest.mark.parametrize(
    ("take", "argument"),
    [(lambda words: brevact.quantize_backward(model(), words), "policy"), (brevact.backward_quant, "source")],
)
def test_a_text_that_is_no_policy_is_refused_with_the_nearest_ones(take, argument):
    with pytest.raises(ValueError, match=rf"{argument} 'StochBackwrd2bit': .*nearest: StochBackward2bit"):
        take("StochBackwrd2bit")
    with pytest.raises(FileNotFoundError):
        take("no/such/policy.json")


def test_overrides_that_are_no_settings_are_refused_by_name():
    for take in (brevact.backward_quant, lambda **overrides: brevact.quantize_backward(model(), **overrides)):
        with pytest.raises(TypeError, match=r"bucket_sise: overrides go with a single quantizer; name one"):
            take(bucket_sise=4)
    with pytest.raises(TypeError, match=r"bits=4 is not a setting of StochBackward2bit; did you mean bit_width\?"):
        brevact.quantize_backward(model(), brevact.StochBackward2bit, bits=4)


def test_what_parse_policy_returns_is_taken_as_a_policy():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    brevact.quantize_backward(model, brevact.parse_policy("StochBackward2bit:bucket_size=128"))
    assert "StochBackward2bit" in str(brevact.backward_policy(model))
    with pytest.raises(ValueError, match=r"'24x' is a budget, which is fitted on batches"):
        brevact.quantize_backward(brevact.restore_backward(model), brevact.parse_policy("24x"))
