"""Costs of calls and of small tensors: the rows of the two benchmarks."""

from benchmarks import dispatch, small_tensors


def test_a_row_has_the_cost_of_a_function_and_the_ratio_of_the_steps():
    rows = dispatch.measure("gpt2", ["nothing packed", "DEFAULT"], rounds=1)
    assert [row["policy"] for row in rows] == ["nothing packed", "DEFAULT"]
    # Three layers, and the loss, of some seventy functions each.
    assert all(100 < row["functions"] < 400 and float(row["ratio"]) > 0 for row in rows)


def test_a_lower_bound_stores_less_of_a_loop(monkeypatch):
    name, steps = "LSTM cell in a loop", 16
    monkeypatch.setitem(small_tensors.MODELS, name, (small_tensors.Loop, (32, steps, 64)))
    rows = small_tensors.measure(name, rounds=1)
    kept = [float(row["kept_mib"]) for row in rows]
    assert kept == sorted(kept, reverse=True) and kept[-1] < float(rows[0]["plain_mib"]) / 8
