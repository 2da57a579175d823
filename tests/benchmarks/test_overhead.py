from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks.overhead import Identity, main, resnet, variants
from benchmarks.training_step import loss_of


def test_identity_keeps_the_gradients_of_the_plain_model():
    torch.manual_seed(0)
    models = variants(resnet())
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    for name in ("plain", "identity"):
        loss_of(models[name], images, labels).backward()
    pairs = zip(models["plain"].parameters(), models["identity"].parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_identity_stores_the_memory_of_the_tensor():
    x = torch.randn(4, 5, 6).permute(2, 0, 1)
    packed = Identity().quantize(x)
    assert packed.buffer.data_ptr() == x.data_ptr() == packed.dequantize().data_ptr()
    assert torch.equal(packed.dequantize(), x) and torch.equal(packed.dequantize_multiply(x), x * x)
    with pytest.raises(ValueError, match="storage of 480"):
        Identity().quantize(x[:2])


def test_main_compares_the_steps(tmp_path: Path):
    main(["--batch-size", "2", "--rounds", "1", "--csv", str(tmp_path / "rows.csv")])
    with open(tmp_path / "rows.csv", newline="") as file:
        kept = {row["stored"]: float(row["kept_mib"]) for row in csv.DictReader(file)}
    assert list(kept) == ["plain", "identity", "StochBackward2bit"]
    assert min(kept["plain"], kept["identity"]) > 5 * kept["StochBackward2bit"]
