"""`python -m benchmarks.gpu.quant_relu`: every call, on the CPU."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.gpu.quant_relu import POLICIES, main


def test_rows_compare_every_policy_with_stock_ops(tmp_path: Path):
    path = tmp_path / "rows.csv"
    assert main(["--device", "cpu", "--numel", str(1 << 14), "--rounds", "2", "--csv", str(path)]) == 0
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [row["call"] for row in rows if row["dtype"] == "float32"]
    calls = [f"{name} {passes}" for name in ("relu", *POLICIES) for passes in ("forward", "forward and backward")]
    assert names == ["copy", *calls] and len(rows) == 2 * len(names)
    assert all(float(row["median_us"]) > 0 for row in rows)
    assert {row["of_stock"] for row in rows if row["call"].startswith("stock")} == {"1.000"}
