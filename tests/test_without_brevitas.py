"""Without Brevitas, models in floating point train, and errors name the calls that need it."""

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
import copy, pickle, tempfile, torch, torch.nn as nn, torch.nn.functional as F
import brevact
from brevact import *

x = torch.randn(4, 512)
for name in brevact.quant.__dict__:
    if "Backward" in name:
        leaf = pickle.loads(pickle.dumps(getattr(brevact, name)))
        assert brevact.quantizer(leaf).quantize(x, seed=0).dequantize().shape == x.shape, name

class Mine(StochBackward2bit):
    bucket_size = 128

batches = [(torch.randn(64, 64), torch.randint(8, (64,))) for _ in range(2)]
loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
plain = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8))
rules = {"0": Mine.let(save_mode=SaveMode.QUANTIZE_ON_BACKWARD), nn.GELU: L4Backward, "*": LosslessBackward}
for policy in (DEFAULT, RECOMPUTE, Mine, rules, fit(plain, batches, loss, ratio=4, quick=True)):
    model = quantize_backward(copy.deepcopy(plain), policy)
    with backward_quant(model):
        value = loss(model, batches[0])
    value.backward()
    assert torch.equal(value, loss(copy.deepcopy(plain).train(), batches[0]))
    assert all(p.grad.isfinite().all() for p in model.parameters())
    report = memory_report(model, batches[0], loss)
    assert report.saved_bytes < report.plain_bytes, report
    print(model, backward_policy(model))
print(gradient_report(model, batches, loss, draws=2))
path = tempfile.mkdtemp() + "/policy.json"
DEFAULT.save(path)
assert Policy.load(path) == DEFAULT
restore_backward(model)
assert not any(name.partition(".")[0] == "brevitas" for name in sys.modules)

saved = '{"brevact": "0", "rules": [{"types": ["brevact.nn.ReLU"], "quantizer": null}]}'
for use in ("from brevact import nn", "import brevact.nn", "brevact.nn.ReLU", "Policy.from_json(saved)"):
    try:
        exec(use)
    except ImportError as error:
        assert "needs Brevitas, which is not installed: pip install" in str(error), (use, error)
    else:
        raise AssertionError(use)
"""


def test_models_train_and_layers_say_what_is_missing():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + USE],
        env={**os.environ, "PYTHONPATH": str(Path(brevact.__file__).parents[1]), "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
