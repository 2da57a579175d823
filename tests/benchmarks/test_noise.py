"""`python -m benchmarks.noise`: what it measures, and what it writes."""

import csv

import pytest

from benchmarks import noise


@pytest.mark.exhaustive
def test_main_writes_a_row_a_policy_and_draws_it(tmp_path, capsys):
    files = {kind: str(tmp_path / f"noise.{kind}") for kind in ("csv", "png")}
    arguments = ["--quick", "--models", "GPT nano", "--cache", str(tmp_path / "weights"), "--csv", files["csv"]]
    pages = ["--plot", files["png"]]
    policies = ["StochBackward2bit", "None"]
    noise.main([*arguments, *pages, "--policies", *policies])
    assert "GPT nano learns" in capsys.readouterr().err
    noise.main([*arguments, *pages, "--policies", "NearestBackward4bit"])
    assert "GPT nano learns" not in capsys.readouterr().err
    with open(files["csv"], newline="") as file:
        stochastic, exact, nearest = csv.DictReader(file)
    assert float(stochastic["noise"]) > 0 == float(nearest["noise"]) < float(nearest["bias2"])
    assert (exact["noise"], exact["bias2"], exact["ratio"]) == ("0", "0", "1.00")
    assert float(stochastic["ratio"]) > float(nearest["ratio"]) > 4
    assert stochastic["loss"] == nearest["loss"] and float(nearest["loss"]) < 3  # the text has about e^4.5 characters
    assert (tmp_path / "noise.png").stat().st_size > 0


@pytest.mark.exhaustive
def test_main_fits_a_policy_to_the_bytes_of_another(tmp_path):
    file = tmp_path / "noise.csv"
    policies = ["--policies", "StochBackward2bit", "fit:bytes=StochBackward2bit"]
    noise.main(["--quick", "--models", "GPT nano", "--csv", str(file), *policies])
    with open(file, newline="") as lines:
        uniform, fitted = csv.DictReader(lines)
    assert int(fitted["saved_bytes"]) <= int(uniform["saved_bytes"])
    assert 0 < float(fitted["noise"]) < float(uniform["noise"]) / 2


def test_latest_keeps_the_last_row_of_each_policy_and_models_together():
    rows = [{"model": model, "policy": policy, "n": n} for n, (model, policy) in enumerate(["ax", "by", "ay", "ax"])]
    assert [row["n"] for row in noise.latest(rows)] == [3, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draws", "1"], "--draws 1 is not possible: use at least 2"),
        (["--unit-batches", "4"], "--unit-batches 4 is not possible: use at least 6"),
        (["--policies", "fit:24x", "--unit-batches", "7"], "--unit-batches 7 leaves fewer than 2 batches to fit on"),
        (["--policies", "fit:24"], "fit:24: fit: 24 is not possible: 24: a budget is written 24x, 512MiB"),
        (["--policies", "fit:bytes=Stoch2bit"], "Stoch2bit is not a backward quantizer"),
        (["--policies", "Stoch2bit"], "Stoch2bit is not a backward quantizer or policy of brevact; nearest: Stoch"),
    ],
)
def test_main_refuses_what_it_cannot_measure(arguments, message, capsys):
    with pytest.raises(SystemExit):
        noise.main(arguments)
    assert message in capsys.readouterr().err
