"""`python -m benchmarks.paired_training`: runs in pairs, each once."""

import pytest

from benchmarks import paired_training
from benchmarks.paired_training import summary
from benchmarks.records import read_rows


def row(policy, seed, loss, accuracy=0.5):
    figures = {"train_loss": str(loss), "test_loss": "1", "test_accuracy": str(accuracy), "test_targets": "1000"}
    return {"model": "net", "policy": policy, "seed": seed, **figures}


def test_summary_subtracts_full_precision_of_the_same_seed():
    exact = [row("None", seed, loss) for seed, loss in (("0", 1.0), ("1", 3.0), ("2", 2.0))]
    noisy = [row("L4Backward", seed, loss) for seed, loss in (("2", 2.2), ("0", 1.1), ("1", 3.3))]
    first, second = summary(exact + noisy)
    assert first["policy"] == "full precision" and first["train difference"] == "0.0000 ± 0.0000"
    assert second["train loss"] == "2.200" and second["train difference"] == "0.2000 ± 0.0577"  # 0.1 / sqrt(3)
    assert second["test accuracy"] == "50.0% ± 0.9%"  # sqrt(0.25 / 3000)


def test_summary_of_one_seed_has_no_error():
    assert summary([row("None", "0", 1), row("L4Backward", "0", 2)])[1]["train difference"] == "1.0000"


@pytest.mark.exhaustive
def test_main_repeats_no_run(tmp_path, capsys):
    path = str(tmp_path / "paired.csv")
    arguments = ["--models", "GPT nano", "--seeds", "0", "--epochs", "1", "--train-size", "10000", "--csv", path]
    arguments += ["--policies", "StochBackward2bit", "LosslessBackward"]
    paired_training.main(arguments)
    rows = read_rows(path)
    paired_training.main(arguments)
    assert read_rows(path) == rows and len(rows) == 3
    exact, noisy, lossless = rows
    # The same weights and batches: without noise the same figures, with it others.
    assert exact["train_loss"] == lossless["train_loss"] != noisy["train_loss"]
    assert exact["test_loss"] == lossless["test_loss"] != noisy["test_loss"]


def test_main_refuses_unknown_policies_before_training(tmp_path, capsys):
    with pytest.raises(SystemExit):
        paired_training.main(["--policies", "Stoch2bit", "--csv", str(tmp_path / "paired.csv")])
    assert "--policies Stoch2bit is not a backward quantizer" in capsys.readouterr().err
