"""Models of benchmarks: checkpoints of their blocks change no gradient."""

import importlib.util

import pytest
import torch

from benchmarks.workloads import MODELS, WORKLOADS

_QUICK = ("mlp", "mobilenet-w4a4")
_LIBRARIES = {"gpt2": "transformers", "gpt2-lora": "peft", "gpt2-lora-bf16": "peft", "bert": "transformers"}
_LIBRARIES |= {"unet3d": "monai", "unet3d-6": "monai"}


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in WORKLOADS]
)
def test_workloads_have_the_same_gradients_with_checkpoints(name: str):
    if name in _LIBRARIES and importlib.util.find_spec(_LIBRARIES[name]) is None:
        pytest.skip(f"needs {_LIBRARIES[name]}")
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, loss = WORKLOADS[name](2, 1, checkpointed)
        torch.manual_seed(1)  # of dropout
        loss().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again)


def test_every_workload_has_its_size():
    assert MODELS.keys() == WORKLOADS.keys()
