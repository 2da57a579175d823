"""`python -m recipes.forces`: a potential that learns forces, whose training differentiates gradients again."""

import pytest
import torch

from recipes.data.lennard_jones import energies_of, make_configurations
from recipes.files import read_rows
from recipes.forces import COLUMNS, COLUMNS_OF_EPOCHS, main
from recipes.models.schnet import SchNet
from tests.recipes.running import PNG, interrupted_at_forward

#: Command line of the smallest runs: two steps an epoch.
TINY = "--side 2 --train-size 8 --test-size 4 --batch-size 4 --epochs 2 --width 8 --interactions 1 --seeds 0 1".split()
#: Packs tensors of the smallest runs, too.
POLICY = "StochBackward4bit:min_numel=0"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forces")
    assert main([*TINY, "--policies", POLICY, "LosslessBackward", "--out-dir", str(folder)]) == 0
    return folder


def without_time(path):
    return [{key: value for key, value in row.items() if key not in ("seconds", "time")} for row in read_rows(path)]


def test_main_trains_pairs_and_writes_rows_and_a_picture(whole_run):
    assert {path.name for path in whole_run.iterdir()} == {"forces.csv", "epochs.csv", "forces.png", "settings.json"}
    rows = read_rows(whole_run / "forces.csv")
    assert tuple(rows[0]) == COLUMNS and len(rows) == 6
    assert tuple(read_rows(whole_run / "epochs.csv")[0]) == COLUMNS_OF_EPOCHS
    assert (whole_run / "forces.png").read_bytes().startswith(PNG)
    plain, packed, lossless = (
        [row for row in rows if row["policy"] == name] for name in ("None", POLICY, "LosslessBackward")
    )
    for own, noisy, same in zip(plain, packed, lossless, strict=True):
        assert own["force_error"] == same["force_error"] != noisy["force_error"]
        assert float(noisy["saved_mib"]) < 0.7 * float(own["saved_mib"]) == 0.7 * float(own["plain_mib"])


def test_main_prints_differences_seed_by_seed(whole_run, capsys):
    command = [*TINY, "--policies", POLICY, "--out-dir", str(whole_run), "--resume"]
    assert main(command) == 0
    output = capsys.readouterr().out
    rows = {(row["policy"], row["seed"]): float(row["force_error"]) for row in read_rows(whole_run / "forces.csv")}
    mean = sum(rows[POLICY, seed] - rows["None", seed] for seed in "01") / 2
    assert f"{mean:+.4f} ± " in output and "x less)" in output and "LosslessBackward" not in output


# Of each run the memory report takes some forward passes, an epoch two for training and one for testing.
@pytest.mark.parametrize("number", [9, 14])
def test_main_resumes_an_interrupted_run_to_the_same_result(whole_run, tmp_path, number):
    command = [*TINY, "--policies", POLICY, "LosslessBackward", "--out-dir", str(tmp_path)]
    with interrupted_at_forward(SchNet, number):
        assert main(command) == 130
    assert main([*command, "--resume"]) == 0
    for name in ("forces.csv", "epochs.csv"):
        assert without_time(tmp_path / name) == without_time(whole_run / name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--side", "1"], "--side 1 is not possible: use at least 2"),
        (["--side", "99"], "--side 99 is not possible: all of 970299 particles are neighbours"),
        (["--batch-size", "9"], "--train-size 8 is not possible: use at least 9"),
        (["--lr", "0"], "--lr 0.0 is not possible: use a value above 0"),
        (["--resume"], "no runs to resume: there is no"),
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    assert main([*TINY, *arguments, "--out-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_main_keeps_runs_with_other_settings_apart(whole_run, capsys):
    assert main([*TINY, "--out-dir", str(whole_run)]) == 2
    assert "already holds runs; go on with --resume" in capsys.readouterr().err
    assert main([*TINY, "--out-dir", str(whole_run), "--resume", "--epochs", "3"]) == 2
    assert "have other settings (--epochs)" in capsys.readouterr().err


def test_configurations_have_the_energies_and_forces_of_their_pairs():
    found = make_configurations(3, 2, seed=0)
    positions, kinds = found.positions.double(), found.kinds
    assert kinds.sum(-1).tolist() == [1, 1, 1]
    for i in range(3):
        expected = 0.0
        for a in range(8):
            for b in range(a):
                pair = int(kinds[i, a] + kinds[i, b])
                sigma, epsilon = ((1.0, 1.0), (0.8, 1.5), (0.88, 0.5))[pair]
                s = sigma / float((positions[i, a] - positions[i, b]).norm())
                expected += 4 * epsilon * (s**12 - s**6)
        assert float(found.energies[i]) == pytest.approx(expected, rel=1e-5)
    step = 1e-5 * torch.randn(positions.shape, dtype=torch.float64)
    difference = energies_of(kinds, positions + step) - energies_of(kinds, positions - step)
    torch.testing.assert_close(difference, -2 * (found.forces * step).sum((1, 2)), rtol=1e-3, atol=1e-6)
    assert torch.equal(make_configurations(3, 2, seed=0).forces, found.forces)


def test_potential_is_invariant_and_its_forces_are_gradients():
    torch.manual_seed(0)
    model, data = SchNet(2, 8, 2).double(), make_configurations(4, 2, seed=1)
    positions = data.positions.double()
    energies, forces = model.eval()(data.kinds, positions)
    assert not forces.requires_grad and model.train()(data.kinds, positions)[1].requires_grad
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    turned, turned_forces = model(data.kinds, positions @ turn + 5.0)
    torch.testing.assert_close(turned, energies)
    torch.testing.assert_close(turned_forces, forces @ turn)
    torch.testing.assert_close(forces.sum(1), torch.zeros(4, 3, dtype=torch.float64))
    step = 1e-5 * torch.randn(positions.shape, dtype=torch.float64)
    difference = model(data.kinds, positions + step)[0] - model(data.kinds, positions - step)[0]
    torch.testing.assert_close(difference, -2 * (forces * step).sum((1, 2)), rtol=1e-5, atol=1e-9)
