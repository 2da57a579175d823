"""`python -m benchmarks.noise`: its estimates on gradients whose noise and bias are known, and what it writes."""

import copy
import csv
import math

import pytest
import torch
from torch import nn

import brevact
from benchmarks import noise
from benchmarks.noise import batch_variance, compare, gradient, variance_and_bias

WEIGHTS, SAMPLES = 400, 4


class Mean(nn.Module):
    """A loss whose gradient is the mean of a batch: independent standard normal samples give variance 1 / SAMPLES."""

    def __init__(self, noise=0.0, bias=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WEIGHTS))
        self.weight.register_hook(lambda grad: grad + bias + noise * torch.randn(WEIGHTS))

    def forward(self, x):
        return (x @ self.weight).mean()


class Net(nn.Module):
    """A batch norm between two layers, and a loss, of tensors that are large enough to be packed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 4, 3))

    def forward(self, x):
        return self.body(x).square().mean()


def batches_of(*shape, count=8):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(*shape, generator=generator)} for _ in range(count)]


def measured(exact_model, model, batches, draws=4):
    exact = torch.stack([gradient(exact_model, batch, 0) for batch in batches])
    return compare(model, batches, exact, batch_variance(exact), draws)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize(("deviation", "shift"), [(0.3, 0.0), (1.0, 0.2), (0.0, 0.2)])
def test_compare_recovers_known_noise_and_bias(deviation, shift):
    found, bias2 = measured(Mean(), Mean(deviation, shift), batches_of(SAMPLES, WEIGHTS, count=16))
    for estimate, expected in ((found, deviation**2 * SAMPLES), (bias2, shift**2 * SAMPLES)):
        assert abs(estimate.value - expected) <= 5 * estimate.error
        assert estimate.error < 0.1 * max(deviation**2, shift**2) * SAMPLES


def test_compare_tells_a_fifth_more_noise():
    found, _ = measured(Mean(), Mean(1.0), batches_of(SAMPLES, WEIGHTS, count=16))
    assert abs(found.value - 1.2 * SAMPLES) > 5 * found.error


def test_batch_variance_recovers_a_known_variance():
    generator = torch.Generator().manual_seed(0)
    for batches in (3, 8, 64):
        found = batch_variance(2 * torch.randn(batches, 1000, generator=generator))
        assert abs(found.value - 4000) <= 5 * 4000 * math.sqrt(2 / (1000 * (batches - 1)))


def test_batch_variance_gives_the_error_of_the_jackknife():
    gradients = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    without = [batch_variance(torch.cat([gradients[:b], gradients[b + 1 :]])).value for b in range(6)]
    spread = torch.tensor(without, dtype=torch.float64).var(correction=0)
    assert batch_variance(gradients).error == pytest.approx(math.sqrt(5 * spread), rel=1e-5)


def test_variance_and_bias_are_unbiased():
    errors = 0.5 + torch.randn(2000, 3, 10, generator=torch.Generator().manual_seed(0))
    variances, biases = torch.tensor([variance_and_bias(each) for each in errors]).T
    for values, expected in ((variances, 10.0), (biases, 2.5)):
        assert abs(values.mean() - expected) <= 5 * values.std() / math.sqrt(2000)


def test_full_precision_has_neither_noise_nor_bias(net):
    found, bias2 = measured(net, net, batches_of(4, 3, 16, 16))
    assert found == bias2 == (0.0, 0.0)


def test_a_nearest_quantizer_has_bias_alone_and_a_stochastic_one_noise(net):
    nearest, stochastic = (
        measured(net, brevact.quantize_backward(copy.deepcopy(net), quantizer), batches_of(4, 3, 16, 16))
        for quantizer in (brevact.NearestBackward2bit, brevact.StochBackward2bit)
    )
    assert nearest[0] == (0.0, 0.0) and nearest[1].value > 5 * nearest[1].error
    assert stochastic[0].value > 5 * stochastic[0].error > 0


def test_gradient_leaves_running_statistics_as_they_are(net):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradient(net, batches_of(4, 3, 16, 16)[0], 0)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_main_writes_a_row_a_policy_and_draws_it(tmp_path, capsys):
    files = {kind: str(tmp_path / f"noise.{kind}") for kind in ("csv", "png", "md")}
    arguments = ["--quick", "--models", "GPT nano", "--cache", str(tmp_path / "weights"), "--csv", files["csv"]]
    noise.main(
        [*arguments, "--plot", files["png"], "--markdown", files["md"], "--policies", "StochBackward2bit", "None"]
    )
    assert "GPT nano learns" in capsys.readouterr().err
    noise.main([*arguments, "--plot", files["png"], "--markdown", files["md"], "--policies", "NearestBackward4bit"])
    assert "GPT nano learns" not in capsys.readouterr().err
    with open(files["csv"], newline="") as file:
        stochastic, exact, nearest = csv.DictReader(file)
    assert float(stochastic["noise"]) > 0 == float(nearest["noise"]) < float(nearest["bias2"])
    assert (exact["noise"], exact["bias2"], exact["ratio"]) == ("0", "0", "1.00")
    assert float(stochastic["ratio"]) > float(nearest["ratio"]) > 4
    assert stochastic["loss"] == nearest["loss"] and float(nearest["loss"]) < 3  # the text has about e^4.5 characters
    page = (tmp_path / "noise.md").read_text()
    assert all(f"| `{row['policy']}` |" in page for row in (stochastic, exact, nearest))
    assert (tmp_path / "noise.png").stat().st_size > 0


def test_latest_keeps_the_last_row_of_each_policy_and_models_together():
    rows = [{"model": model, "policy": policy, "n": n} for n, (model, policy) in enumerate(["ax", "by", "ay", "ax"])]
    assert [row["n"] for row in noise.latest(rows)] == [3, 2, 1]


def test_plot_shows_noise_where_there_is_some_and_bias_elsewhere():
    def row(policy, found, bias2):
        figures = {"noise": found, "noise_se": "0.01", "bias2": bias2, "bias2_se": "0.01", "saved_bytes": "1048576"}
        return {"model": "net", "policy": policy, **figures}

    (panel,) = noise.plot(
        [row("StochBackward2bit", "0.5", "-0.1"), row("L4Backward", "0", "0.2"), row("None", "0", "0")]
    ).axes
    assert {text.get_text(): text.xy for text in panel.texts} == {"Stoch2bit": (1, 0.5), "L4": (1, 0.2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draws", "1"], "--draws 1 is not possible: use at least 2"),
        (["--unit-batches", "4"], "--unit-batches 4 is not possible: use at least 6"),
        (["--policies", "Stoch2bit"], "Stoch2bit is not a backward quantizer or policy of brevact; nearest: Stoch"),
    ],
)
def test_main_refuses_what_it_cannot_measure(arguments, message, capsys):
    with pytest.raises(SystemExit):
        noise.main(arguments)
    assert message in capsys.readouterr().err
