"""`python -m benchmarks.adaptive`: once, and its picture."""

import pytest

from benchmarks import adaptive
from benchmarks.adaptive import COLUMNS, STRATEGIES
from benchmarks.records import read_rows


@pytest.mark.exhaustive
def test_main_writes_a_row_for_each_case(tmp_path, capsys):
    path, picture = tmp_path / "adaptive.csv", tmp_path / "adaptive.png"
    arguments = ["--model", "GPT nano", "--train-size", "10000", "--widths", "2", "--stored", "own"]
    arguments += ["--batches", "2", "--draws", "2", "--unit-batches", "4", "--csv", str(path), "--plot", str(picture)]
    adaptive.main(arguments)
    rows = read_rows(str(path))
    assert [row["strategy"] for row in rows] == list(STRATEGIES) and set(COLUMNS) <= set(rows[0])
    noise = {row["strategy"]: float(row["noise"]) for row in rows}
    assert noise["layers"] < noise["fixed"]
    sizes = [int(row["saved_bytes"]) for row in rows]
    assert max(sizes) < 1.02 * min(sizes)  # what samples store beside: their widths, and bytes that align
    assert picture.stat().st_size
