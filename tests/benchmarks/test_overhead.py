from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.overhead import Identity, mean_and_error, resnet, variants
from benchmarks.training_step import loss_of


@pytest.mark.parametrize("name", ["bare Functions", "identity"])
def test_variants_keep_the_gradients_of_the_plain_model(name):
    torch.manual_seed(0)
    models = variants(resnet())
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])
    for each in ("plain", name):
        loss_of(models[each], images, labels).backward()
    pairs = zip(models["plain"].parameters(), models[name].parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_identity_stores_the_memory_of_the_tensor():
    x = torch.randn(4, 5, 6).permute(2, 0, 1)
    packed = Identity().quantize(x)
    assert packed.buffer.data_ptr() == x.data_ptr() == packed.dequantize().data_ptr()
    assert torch.equal(packed.dequantize(), x) and torch.equal(packed.dequantize_multiply(x), x * x)
    part = x[1:].permute(1, 2, 0).contiguous()[1:]
    assert torch.equal(Identity().quantize(part).dequantize(), part)
    with pytest.raises(ValueError, match="strides"):
        Identity().quantize(x[:2])


@pytest.mark.exhaustive
def test_main_compares_the_steps(tmp_path: Path):
    """In a process of its own, whose allocator it changes."""
    arguments = ["--batch-size", "2", "--processes", "1", "--rounds", "1", "--csv", str(tmp_path / "rows.csv")]
    subprocess.run([sys.executable, "-m", "benchmarks.overhead", *arguments], check=True, capture_output=True)
    with open(tmp_path / "rows.csv", newline="") as file:
        kept = {row["stored"]: float(row["kept_mib"]) for row in csv.DictReader(file)}
    assert list(kept) == ["plain", "bare Functions", "identity", "StochBackward2bit"]
    assert min(kept["plain"], kept["bare Functions"], kept["identity"]) > 5 * kept["StochBackward2bit"]


def test_mean_and_error_are_those_of_the_processes():
    assert mean_and_error([2.0, 3.0, 4.0]) == pytest.approx((3.0, 3**-0.5))  # deviation 1
    found, error = mean_and_error([2.0])
    assert found == 2.0 and math.isnan(error)
