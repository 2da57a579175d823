"""`python -m benchmarks.adaptive`: once, and its picture."""

import pytest

from benchmarks import adaptive
from benchmarks.adaptive import COLUMNS, STORED, STRATEGIES, WORDS, plot
from benchmarks.records import read_rows


def test_plot_draws_a_line_for_each_strategy():
    figures = {"noise": "0.1", "noise_se": "0.01", "model": "ResNet-20"}
    rows = [
        {**figures, "stored": stored, "strategy": strategy, "bit_width": width}
        for stored in STORED
        for strategy in STRATEGIES
        for width in ("2", "1.5")
    ]
    panels = plot([*rows, {**rows[0], "model": "other", "noise": "9"}], "ResNet-20").axes
    assert len(panels) == len(STORED)
    for panel in panels:
        assert [text.get_text() for text in panel.get_legend().texts] == [WORDS[name] for name in STRATEGIES]
        assert all(list(line.get_xdata()) == [1.5, 2.0] for line in panel.lines if len(line.get_xdata()) == 2)


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
