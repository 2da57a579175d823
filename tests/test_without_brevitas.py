"""Where Brevitas is not installed, the quantizers work by themselves, and the rest says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import brevact

#: Brevitas is nowhere on the path; the rest of the environment is.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "brevitas" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
USE = """
import pickle, torch
import brevact.quantizers as quantizers
x = torch.randn(64, 512)
for name in quantizers.__all__:
    if name.endswith("Quantizer") and name not in ("ActivationQuantizer", "MixingQuantizer"):
        quantizer = pickle.loads(pickle.dumps(getattr(quantizers, name)()))
        assert quantizer.quantize(x, seed=0).dequantize().shape == x.shape, name
from brevact import autograd, quantizers, __version__
assert not any(name.partition(".")[0] == "brevitas" for name in sys.modules)
for ask in ("from brevact import StochBackward2bit", "import brevact; brevact.fit"):
    try:
        exec(ask)
    except ImportError as error:
        assert "needs Brevitas, which is not installed: pip install" in str(error)
    else:
        raise AssertionError(ask)
"""


def test_quantizers_work_and_leaves_say_what_is_missing():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + USE],
        env={**os.environ, "PYTHONPATH": str(Path(brevact.__file__).parents[1]), "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
