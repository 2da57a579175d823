"""`python -m benchmarks.layer_noise`: what it writes, and what it says of estimates."""

from __future__ import annotations

import csv

import pytest

from benchmarks import layer_noise


def row(layer: str, noise: float, estimate: float) -> dict[str, str]:
    figures = {"noise": str(noise), "noise_error": "0.1", "estimate": str(estimate), "estimate_error": "0.1"}
    return {"model": "net", "layer": layer, "bias": "0", "bias_error": "0", **figures}


ROWS = [row("a", 4, 3), row("b", 1, 5), row("c", 2, float("nan")), row("d", -1, 0.5), row("total", 7, float("nan"))]


def test_summary_says_how_well_estimates_find_the_noisiest():
    found = layer_noise.summary("net", ROWS)
    assert (found["layers"], found["sum of layers"], found["sum of estimates"]) == (4, "7.0000", "8.5000")
    assert (found["in the noisiest quarter"], found["in the quarter by estimate"]) == ("0.57", "0.14")


@pytest.mark.exhaustive  # the quick tier has gradient_report, and benchmarks.noise with the same models
def test_main_writes_a_row_a_layer_and_draws_them(tmp_path, capsys):
    files = str(tmp_path / "rows.csv"), str(tmp_path / "rows.png")
    layer_noise.main(["--quick", "--models", "GPT nano", "--csv", files[0], "--plot", files[1]])
    assert "sum of estimates" in capsys.readouterr().out
    with open(files[0], newline="") as file:
        *layers, total = csv.DictReader(file)
    assert total["layer"] == "total" and float(total["noise"]) > 0
    assert len(layers) > 10 and "(model)" not in {each["layer"] for each in layers[:1]}
    assert sum(float(each["estimate"]) > 0 for each in layers) > 5
    assert (tmp_path / "rows.png").stat().st_size > 0
