"""The CPU kernels without Numba."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_KERNELS = """
import importlib.metadata, os, sys, tempfile, warnings
import torch

sys.modules["brevitas"] = None  # not to be imported: quantizers do without it

def install(name, text):
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    with open(f"{folder}/{name}.py", "w") as file:
        file.write(text)
    sys.path.insert(0, folder)

for prepare in sys.argv[2:]:
    if not os.fork():
        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(dir=sys.argv[1])
        exec(prepare)
        break
    assert os.wait()[1] == 0
else:
    os._exit(0)

from brevact.quantizers import Layout, UniformQuantizer, mask_multiply, pack_codes, pack_mask, unpack_codes, unpack_mask
x = torch.linspace(-1, 2, 1000)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    packed = UniformQuantizer(bit_width=3).quantize(x, seed=5)
    grad = mask_multiply(pack_mask(x), Layout.of(x), x, negative_slope=0.5)
messages = [str(warning.message) for warning in caught]
assert len(messages) == 1 and "CPU kernels cannot be compiled here" in messages[0], messages
assert torch.equal(grad, torch.where(x > 0, x, x * 0.5)) and torch.equal(unpack_mask(pack_mask(x), Layout.of(x)), x > 0)
assert torch.equal(unpack_codes(pack_codes(torch.arange(100), 7), 7, 100), torch.arange(100, dtype=torch.int32))
assert torch.equal(packed.dequantize_multiply(x), packed.dequantize() * x)
assert "numba" not in sys.modules
print(packed.codes.numpy().tobytes().hex(), flush=True)
os._exit(0)  # the end of an interpreter that has imported torch takes a second
"""
#: Code before the import that makes Numba fail.
WITHOUT_NUMBA = """
version = importlib.metadata.version
def version_but_of_numba(name):
    if name == "numba":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = version_but_of_numba
"""
BROKEN_NUMBA = "install('numba', 'raise ImportError')"
WITHOUT_LLVM = "install('llvmlite', 'raise OSError(\"libllvmlite.so: cannot open shared object file\")')"
COMPILES_NOTHING = "os.environ['NUMBA_DISABLE_JIT'] = '1'"


@pytest.mark.parametrize(
    "prepares",
    [
        pytest.param([WITHOUT_NUMBA], id="without numba"),
        pytest.param([BROKEN_NUMBA, WITHOUT_LLVM, COMPILES_NOTHING], id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_quantize_without_numba_gives_the_same_bytes(prepares: list[str], tmp_path: Path):
    import torch

    from brevact.quantizers import UniformQuantizer

    command = [sys.executable, "-c", WITHOUT_KERNELS, str(tmp_path), *prepares]
    run = subprocess.run(command, timeout=240, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    packed = UniformQuantizer(bit_width=3).quantize(torch.linspace(-1, 2, 1000), seed=5)
    assert run.stdout.split() == [packed.codes.numpy().tobytes().hex()] * len(prepares)
