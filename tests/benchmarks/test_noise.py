"""`python -m benchmarks.noise`: what it measures, and what it writes."""

import csv

import pytest

from benchmarks import noise


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
