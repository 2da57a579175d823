"""Noise along a run, of policies that are fitted early and late."""

import pytest

from recipes import files
from recipes.study.noise_along import COLUMNS, Effort, draw, epochs_of, measure, table
from recipes.study.run import Run, Size
from tests.recipes.running import PNG

SIZE = Size("digits", 2, 16)
RUN = Run("None", 0, SIZE, changes=(("batch_size", 8), ("test_size", 8), ("warmup_epochs", 0.5)))


def test_epochs_of_are_early_ones_and_the_last():
    assert epochs_of(Size(epochs=10)) == (0, 1, 3, 10)
    assert epochs_of(Size(epochs=2)) == (0, 1, 2)


@pytest.mark.exhaustive
def test_measure_tells_of_each_policy_at_each_epoch(tmp_path):
    rows = list(measure(RUN, "data", "cpu", Effort(unit_batches=6, batches=2, draws=2)))
    early, late = ([row["policy"] for row in rows if row["epoch"] == epoch] for epoch in (0, 2))
    fits = [f"fit:bytes=DEFAULT {when}" for when in ("at 0", "at 1", "now")]
    assert early == ["StochBackward2bit", "DEFAULT", fits[0], fits[2]]
    assert sorted(late) == sorted(["StochBackward2bit", "DEFAULT", *fits])
    noise = {(row["policy"], row["epoch"]): row["noise"] for row in rows}
    assert all(noise["StochBackward2bit", epoch] > noise["DEFAULT", epoch] > 0 for epoch in (0, 1, 2))
    assert noise[fits[0], 0] == noise[fits[2], 0]  # the same policy, weights, batches and seeds
    assert max(row["saved_bytes"] for row in rows if row["policy"] in fits) <= rows[1]["saved_bytes"]
    files.write_rows(tmp_path / "rows.csv", COLUMNS, rows)
    read = files.read_rows(tmp_path / "rows.csv")
    assert table(read).splitlines()[2:] == table(rows).splitlines()[2:]
    draw(tmp_path / "rows.png", read)
    assert (tmp_path / "rows.png").read_bytes().startswith(PNG)
