"""`python -m recipes.forces`: a potential that learns forces, whose training differentiates gradients again."""

import pytest
import torch

from recipes.data.lennard_jones import energies_of, make_configurations
from recipes.files import read_rows
from recipes.forces import main
from recipes.models.schnet import SchNet
from tests.recipes.running import POLICY, refused

#: Command line of the smallest runs: two steps an epoch.
TINY = "--side 2 --train-size 8 --test-size 4 --batch-size 4 --epochs 2 --width 8 --interactions 1 --seeds 0 1".split()


def test_main_trains_pairs(tmp_path, capsys):
    assert main([*TINY, "--compare", POLICY, "LosslessBackward", "--out-dir", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "runs.csv")
    plain, packed, lossless = (
        [row for row in rows if row["variant"] == name] for name in ("plain", POLICY, "LosslessBackward")
    )
    for own, noisy, same in zip(plain, packed, lossless, strict=True):
        assert own["value"] == same["value"] != noisy["value"]
        assert float(noisy["kept_mib"]) < 0.7 * float(own["kept_mib"])
    assert "force error - plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--side", "1"], "--side 1 is not possible: use 2 to 8"),
        (["--batch-size", "9"], "--train-size 8 is not possible: use at least 9"),
        (["--variants", "checkpoint"], "--variants checkpoint is not possible"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    refused(main, [*TINY, *arguments, "--out-dir", str(tmp_path / "runs")], message, capsys)


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
