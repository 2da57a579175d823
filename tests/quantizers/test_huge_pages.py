"""Large results on huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from brevact.heap import VARIABLE
from brevact.quantizers.huge_pages import SMALLEST, prefer_huge_pages

RESULTS = """
import re
from pathlib import Path
import torch
from brevact.quantizers import UniformQuantizer
from brevact.quantizers.huge_pages import SMALLEST

def flags(address):
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line
    return ""

for numel, expected in ((SMALLEST // 4, True), (SMALLEST // 8, False)):
    y = UniformQuantizer(bit_width=2).quantize(torch.zeros(numel)).dequantize()
    assert (" hg" in flags(y.data_ptr() + y.nbytes // 2)) is expected, numel
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise with huge pages is Linux's")
def test_dequantize_asks_for_huge_pages_for_large_results_only():
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    environment = {**os.environ, VARIABLE: "0"}  # or PyTorch would ask for them, too
    subprocess.run([sys.executable, "-c", RESULTS], env=environment, timeout=120, check=True)


def test_prefer_huge_pages_of_a_tensor_without_memory_does_nothing():
    prefer_huge_pages(torch.empty(0))
    prefer_huge_pages(torch.empty(SMALLEST, device="meta"))
